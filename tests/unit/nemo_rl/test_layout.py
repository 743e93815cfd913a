"""A config whose GPUs, ranks, batches or memory cannot be is refused before Ray starts; one that can says what runs."""

import json
import re
from pathlib import Path

import pytest
from test_nemo_rl_config import QWEN3_30B, config, problems

from qarl_nemo.config import ConfigError
from qarl_nemo.memory import Learner, ModelSize, rank_memory
from qarl_nemo.nemo_rl import layout_memory
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.checks import hints
from qarl_nemo.nemo_rl.checks.conflicts import find_conflicts
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.launch_summary import launch_summary
from qarl_nemo.nemo_rl.layout import read_layout
from qarl_nemo.nemo_rl.layout_memory import DEFAULT_GIB, needed_memory
from qarl_nemo.nemo_rl.model_shapes import fetch_model_config

APART = {"policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": 2, "num_nodes": 1}}}
WHOLE_NODES = {
    "cluster": {"num_nodes": 2, "gpus_per_node": 8},
    "policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": 8, "num_nodes": 1}},
}
EXPERTS = "policy.generation.vllm_cfg.expert_parallel_size"
SHARE = "policy.generation.vllm_cfg.gpu_memory_utilization"
MUON = {"optimizer": "dist_muon", "use_distributed_optimizer": False}


@pytest.fixture(autouse=True)
def on_a_host_without_gpus(monkeypatch):
    monkeypatch.setattr(hints, "first_host_gib", lambda: None)


def launch(qarl=None, **changes) -> dict:
    """The one-node recipe's GPUs, ranks and batches, with dotted changes; cards of 80 GB."""
    said = {
        "cluster": {"num_nodes": 1, "gpus_per_node": 8},
        "policy.megatron_cfg.sequence_parallel": True,
        "policy.megatron_cfg.activation_checkpointing": True,
        "policy.megatron_cfg.optimizer": MUON,
        "policy.megatron_cfg.distributed_data_parallel_config": {"overlap_param_gather": False},
        SHARE: 0.6,
    }
    block = {"format": "w4a16", "keep_operand": False, "gpu_memory_gib": DEFAULT_GIB} | (qarl or {})
    return config(block, **said | changes)


def test_what_can_run_is_not_refused():
    apply_qarl(launch())
    apply_qarl(launch(cluster={"num_nodes": 2, "gpus_per_node": 8}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cluster": {"num_nodes": 1, "gpus_per_node": 4}}, "expert_model_parallel_size=8, pipeline"),
        ({"policy.megatron_cfg.expert_model_parallel_size": 3}, "does not divide the 128 experts"),
        ({"policy.megatron_cfg.expert_model_parallel_size": 3}, "product 3 does not divide the learner's 8 GPUs"),
        ({"policy.megatron_cfg.context_parallel_size": 3}, "product 6 does not divide the learner's 8 GPUs"),
        ({"policy.megatron_cfg.expert_tensor_parallel_size": 2}, "product 16 does not divide"),
        ({"policy.megatron_cfg.pipeline_model_parallel_size": 5}, "does not divide the 48 layers"),
        (
            {
                "policy.megatron_cfg.pipeline_model_parallel_size": 4,
                "policy.megatron_cfg.num_layers_in_first_pipeline_stage": 1,
            },
            "does not divide the 47 layers left beside stages of 1",
        ),
        ({"policy.megatron_cfg.sequence_parallel": False}, "sequence_parallel=false"),
        (
            {"policy.megatron_cfg.sequence_parallel": False, "policy.megatron_cfg.expert_model_parallel_size": 1},
            "sequence_parallel=false",
        ),
        ({"policy.generation.vllm_cfg.tensor_parallel_size": 3}, "does not divide the engines' 8 GPUs"),
        ({"policy.generation.vllm_cfg.tensor_parallel_size": 3}, "does not divide the 32 attention heads"),
        (
            {
                "policy.generation.vllm_cfg.tensor_parallel_size": 2,
                "policy.generation.vllm_cfg.expert_parallel_size": 3,
            },
            "must be a multiple of tensor_parallel_size=2",
        ),
        (
            {"policy.generation.vllm_cfg.async_engine": True, "policy.generation.vllm_cfg.expert_parallel_size": 8},
            "or async_engine=false",
        ),
        ({"policy.train_global_batch_size": 2}, "train_global_batch_size=2: is not a multiple of the 4 data parallel"),
        ({"policy.train_micro_batch_size": 3}, "train_micro_batch_size=3: does not divide the 32 of a rank"),
        ({"policy.logprob_batch_size": 3}, "logprob_batch_size=3: does not divide the 128 of a rank"),
        (
            {
                "policy.max_total_sequence_length": 9000,
                "policy.sequence_packing": {"enabled": True, "train_mb_tokens": 8192, "logprob_mb_tokens": 9000},
            },
            "sequence_packing.train_mb_tokens=8192: a response of policy.max_total_sequence_length=9000 does not fit",
        ),
        (
            {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 0, "logprob_mb_tokens": 9000}},
            "sequence_packing.train_mb_tokens=0: set 1 or more",
        ),
        (
            {"data.max_input_seq_length": 2048, "policy.generation.vllm_cfg.max_model_len": 1000},
            "max_model_len=1000: a prompt of data.max_input_seq_length=2048 tokens does not fit",
        ),
        ({"policy.logprob_chunk_size": 1024}, "defer_fp32_logits=false: policy.logprob_chunk_size=1024 needs it"),
        ({"policy.logprob_chunk_size": -4}, "policy.logprob_chunk_size=-4: set 1 or more, or null"),
        ({"policy.megatron_cfg.tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0: set 1 or more"),
        ({"cluster": {"num_nodes": 1, "gpus_per_node": -8}}, "cluster.gpus_per_node=-8: set 1 or more"),
        ({"policy.generation.colocated": {"enabled": False}}, "resources.gpus_per_node=null"),
        (
            {"cluster": {"num_nodes": 2, "gpus_per_node": 8}} | APART,
            "resources.gpus_per_node=2: engines take whole nodes; set 8",
        ),
        (APART, "product 8 does not divide the learner's 6 GPUs"),
        (
            {"policy.generation.colocated": {"enabled": False, "resources": {"gpus_per_node": -1}}},
            "=-1: learner and en",
        ),
        ({"policy.generation.vllm_cfg.tensor_parallel_size": 0}, "tensor_parallel_size=0: set 1 or more"),
        ({"policy.generation.vllm_cfg.tensor_parallel_size": "two"}, "tensor_parallel_size=two: not a whole number"),
        ({SHARE: "most"}, f"{SHARE}=most: not a number; set a GPU's share"),
        ({"policy.generation.max_new_tokens": 0}, "policy.generation.max_new_tokens=0: set 1 or more"),
        ({"policy.max_total_sequence_length": -1}, "policy.max_total_sequence_length=-1: set 1 or more"),
        ({"checkpointing": {"save_period": 0}}, "checkpointing.save_period=0: set 1 or more"),
    ],
)
def test_what_cannot_run_is_refused(changes, named):
    assert any(named in line for line in problems(launch(**changes))), problems(launch(**changes))


STAGES = "policy.megatron_cfg.pipeline_model_parallel_size"
FIRST_STAGE = "policy.megatron_cfg.num_layers_in_first_pipeline_stage"
LEARNER_TP = "policy.megatron_cfg.tensor_model_parallel_size"
ENGINE_TP = "policy.generation.vllm_cfg.tensor_parallel_size"
# Whole KV heads on each rank of the learner, of which the model has 4.
ATTENTION = {"qarl.targets": ["experts", "attention"]}
# What a refusal ends with.
PROPOSED = re.compile(r"(?:set|may be) (\d+(?:(?:, | or )\d+)*)$")


@pytest.mark.parametrize(
    ("changes", "legal"),
    [
        ({"cluster": {"num_nodes": 1, "gpus_per_node": 4}}, "expert_model_parallel_size may be 1, 2 or 4"),
        (
            {"policy.megatron_cfg.expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size may be 1, or expert_model_parallel_size may be 1, 2 or 4",
        ),
        (
            {"policy.megatron_cfg.expert_tensor_parallel_size": 3, STAGES: 3, LEARNER_TP: 3},
            "the product may be 1, 2, 4 or 8",
        ),
        (APART, "expert_model_parallel_size may be 1 or 2"),
        ({"policy.megatron_cfg.expert_model_parallel_size": 3}, "the 128 experts; set 1, 2, 4 or 8"),
        ({STAGES: 5}, "the 48 layers; set 1, 2, 4 or 8"),
        ({STAGES: 4, FIRST_STAGE: 1}, "the 47 layers left beside stages of 1; set 2"),
        ({STAGES: 4, FIRST_STAGE: 49}, "set other policy.megatron_cfg.num_layers_in_{first,last}_pipeline_stage"),
        ({ENGINE_TP: 3}, "the engines' 8 GPUs (cluster.num_nodes=1, cluster.gpus_per_node=8); set 1 or 2"),
        # On four ranks an expert's 768 columns are 192 each, no multiple of the group.
        ({ENGINE_TP: 3}, "the 32 attention heads; set 1 or 2"),
        ({ENGINE_TP: 3, EXPERTS: 3}, "the 32 attention heads; set 1, 2, 4 or 8"),
        ({LEARNER_TP: 3}, "the 32 attention heads; set 1, 2, 4 or 8"),
        ({LEARNER_TP: 3, **ATTENTION}, "the 32 attention heads and 4 KV heads; set 1, 2 or 4"),
        ({LEARNER_TP: 8, **ATTENTION}, "does not divide the 4 KV heads; set 1, 2 or 4"),
        ({LEARNER_TP: 3, **ATTENTION}, "learner's 8 GPUs (cluster.num_nodes=1, cluster.gpus_per_node=8); beside the"),
        ({LEARNER_TP: 3, **ATTENTION}, "others, tensor_model_parallel_size may be 1, 2 or 4"),
        ({ENGINE_TP: 3, **ATTENTION}, "the 32 attention heads; set 1 or 2"),
        ({ENGINE_TP: 2, EXPERTS: 3}, "must be a multiple of tensor_parallel_size=2; set 1, 2, 4 or 8"),
        ({ENGINE_TP: 4, EXPERTS: 16}, "the engines' 8 GPUs; set 4 or 8"),
        (
            {"policy.train_global_batch_size": 130},
            "does not divide the 512 responses of a step; set 512 or 256",
        ),
        ({"policy.train_global_batch_size": 2}, "is not a multiple of the 4 data parallel learner ranks; set e.g. 4"),
        ({"policy.train_micro_batch_size": 3}, "does not divide the 32 of a rank; set 1, 2, 4, 8, 16 or 32"),
        ({"policy.megatron_cfg.sequence_parallel": False}, "; set true"),
    ],
)
def test_a_refusal_says_what_is_left(changes, legal):
    assert any(legal in line for line in problems(launch(**changes))), problems(launch(**changes))


@pytest.mark.parametrize("key", [LEARNER_TP, ENGINE_TP])
@pytest.mark.parametrize("gpus", [6, 8])
@pytest.mark.parametrize("name", ["w4a8", "w4a16"])
def test_what_one_refusal_proposes_no_other_refuses(name, gpus, key):
    def refusals(size):
        # One expert rank divides any number of GPUs; equal batches are what NeMo-RL wants of large sizes.
        alone = {"policy.megatron_cfg.expert_model_parallel_size": 1, "policy.logprob_batch_size": 1}
        said = {"cluster": {"num_nodes": 1, "gpus_per_node": gpus}, LEARNER_TP: 1, **alone, **ATTENTION, key: size}
        values = launch({"format": name}, **said)
        found = find_conflicts(values, NemoQarlConfig.model_validate(values["qarl"]))
        return [line for line in found if key.rpartition(".")[2] in line and not line.startswith("memory")]

    proposed = [found[1] for line in refusals(3) if (found := PROPOSED.search(line))]
    assert len(set(proposed)) == 1, proposed
    for size in re.findall(r"\d+", proposed[0]):
        assert refusals(int(size)) == []


def test_a_format_that_scales_rows_leaves_one_learner_rank_a_weight():
    # o_proj has a scale for each row, and tensor parallelism cuts its rows.
    for size in (2, 3, 8):
        lines = problems(launch({"format": "w4a8"}, **{LEARNER_TP: size, "policy.logprob_batch_size": 1}, **ATTENTION))
        found = [PROPOSED.search(line) for line in lines if f"tensor_model_parallel_size={size}" in line]
        assert found
        assert all(one and one[1] == "1" for one in found), lines


def test_the_fullest_stage_of_an_uneven_pipeline_counts():
    def weights(pp, first, last):
        megatron = {"pipeline_model_parallel_size": pp, "expert_model_parallel_size": 2} | {
            f"num_layers_in_{end}_pipeline_stage": count for end, count in (("first", first), ("last", last))
        }
        values = launch(**{f"policy.megatron_cfg.{key}": value for key, value in megatron.items()})
        layout = read_layout(values)
        return rank_memory(ModelSize.read(Path(QWEN3_30B)), layout.ranks, Learner("w4a16", 128, ("experts",))).parts[
            "weights"
        ]

    even, uneven = weights(4, None, None), weights(4, 4, 4)
    assert weights(4, 12, 12) == even
    # Twenty layers, not twelve, beside a table.
    assert 1.5 < uneven / even < 20 / 12


def test_all_of_it_comes_in_one_error():
    changes = {
        "policy.megatron_cfg.expert_model_parallel_size": 3,
        "policy.generation.vllm_cfg.tensor_parallel_size": 3,
        "policy.precision": "float16",
    }
    named = {line.partition(":")[0] for line in problems(launch(**changes))}
    assert {"policy.precision=float16", "policy.megatron_cfg.expert_model_parallel_size=3"} <= named
    assert "policy.generation.vllm_cfg.tensor_parallel_size=3" in named


def test_experts_need_a_model_that_has_them(tmp_path):
    shapes = {"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8,
              "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    values = launch({"targets": ["mlp"]}, **{"policy.model_name": str(tmp_path)})
    assert any("expert_model_parallel_size=8: the model has no experts" in line for line in problems(values))


def test_engines_of_their_own_leave_the_learner_the_rest():
    values = launch(**{"cluster": {"num_nodes": 3, "gpus_per_node": 8}} | APART)
    layout = read_layout(values)
    assert (layout.learner_gpus, layout.engine_gpus, layout.engines) == (16, 8, 8)


@pytest.mark.parametrize(
    ("qarl", "changes", "named"),
    [
        ({"gpu_memory_gib": 40}, {}, "policy.train_micro_batch_size=1: a learner rank needs 60 GiB and 10 beside"),
        ({"gpu_memory_gib": 40}, {}, "policy.logprob_batch_size=4: a learner rank needs"),
        ({"gpu_memory_gib": 40}, {}, "(qarl.gpu_memory_gib)"),
        ({"layerwise_refit": False, "format": "bf16", "alignment": "none"}, {}, "memory: a refit needs"),
        (
            {"format": "bf16", "alignment": "none"},
            {SHARE: 0.6},
            "an engine's weights are 57 GiB",
        ),
        ({"resident": False}, {SHARE: 0.95}, f"{SHARE}=0.95: more than a GPU has beside the 6 GiB of the learner's"),
        ({"resident": False}, {SHARE: 0.95}, "; set at most 0.82"),
        ({}, {SHARE: 1.5} | WHOLE_NODES, f"{SHARE}=1.5: more than a GPU has beside the 16.8 GiB of an arriving"),
    ],
)
def test_what_does_not_fit_is_refused(qarl, changes, named):
    values = launch(qarl, **{"policy.generation.vllm_kwargs": {}} | changes)
    assert any(named in line for line in problems(values)), problems(values)


def test_where_no_response_fits_a_shorter_one_and_other_layouts_are_named():
    tokens = {"enabled": True, "train_mb_tokens": 32768, "logprob_mb_tokens": 32768}
    said = {"policy.max_total_sequence_length": 32768, "policy.sequence_packing": tokens}
    (line,) = problems(launch(**said))
    assert "set at most 27648 here and in policy.max_total_sequence_length, " in line
    assert "a layout in which it fits by computation (tp4_ep8) in policy.megatron_cfg" in line
    shorter = {"enabled": True, "train_mb_tokens": 27648, "logprob_mb_tokens": 27648}
    apply_qarl(launch(**{"policy.max_total_sequence_length": 27648, "policy.sequence_packing": shorter}))
    apply_qarl(launch(**said | {LEARNER_TP: 4, "policy.logprob_batch_size": 1}))
    (update, scores, *_) = problems(launch({"gpu_memory_gib": 24}))
    assert "policy.train_micro_batch_size=1" in update
    assert "max_total_sequence_length" not in update
    assert "policy.logprob_batch_size=4" in scores
    assert "set policy.max_total_sequence_length to at most 4096, " in scores


def test_a_bf16_learner_keeps_a_copy_of_its_experts_as_others_keep_packed_ones():
    values = launch({"format": "bf16", "alignment": "none"})
    qarl = NemoQarlConfig.model_validate(values["qarl"])
    # Experts of 48 layers on eight ranks, 2 bytes each.
    assert needed_memory(values, qarl, optimizer_stays=False).learner.parts["packed"] == 48 * 128 * 3 * 768 * 2048 / 4


def test_a_larger_card_takes_more():
    apply_qarl(launch({"gpu_memory_gib": 139, "keep_operand": True}))


def test_engines_that_share_experts_hold_and_wake_fewer():
    qarl = NemoQarlConfig(keep_operand=False, targets=["experts", "attention"])
    alone, shared = (needed_memory(launch(**{EXPERTS: size}), qarl, optimizer_stays=False) for size in (1, 8))
    # Seven eighths of 28.99 billion parameters at 4.125 bits, on each engine's GPU.
    saved = 28.991029248e9 * 4.125 / 8 * 7 / 8
    assert alone.engine - shared.engine == pytest.approx(saved)
    assert alone.refit - shared.refit == pytest.approx(saved)


def test_a_machines_memory_is_that_of_its_container(monkeypatch, tmp_path):
    limits = [tmp_path / "memory.max", tmp_path / "no_such_file"]
    monkeypatch.setattr(layout_memory, "_CONTAINER_LIMITS", limits)
    monkeypatch.setattr(layout_memory, "first_gpu_gib", lambda: None)
    assert layout_memory.first_host_gib() is None
    monkeypatch.setattr(layout_memory, "first_gpu_gib", lambda: 140.0)
    limits[0].write_text("max\n")
    whole = layout_memory.first_host_gib()
    assert whole is not None
    limits[0].write_text(str(2**29))
    assert layout_memory.first_host_gib() == 0.5 < whole


def test_a_checked_config_says_what_will_run():
    values = launch()
    qarl = apply_qarl(values)
    secret = "policy.megatron_cfg.env_vars.HF_TOKEN="
    words = ["examples/run_qarl_grpo.py", "--config", "a b.yaml", f"{secret}hf_abc"]
    text = launch_summary(values, qarl, words, None)
    assert "8 (1 node(s) of 8), shared by learner and engines" in text
    assert "8 ranks: TP2 EP8, 4 data parallel" in text
    assert "8 of 1 GPU(s) each" in text
    assert "64 prompts x 8 responses each, 4 optimizer step(s) of 128; objective tbpo" in text
    assert "GiB a learner rank between steps" in text
    assert text.endswith(f"command: python examples/run_qarl_grpo.py --config 'a b.yaml' '{secret}***'")


def test_without_the_models_config_shapes_are_said_to_be_unchecked(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    name = "nobody/nothing-of-this-name"
    unchecked = fetch_model_config(name)
    values = launch(**{"policy.model_name": name})
    text = launch_summary(values, apply_qarl(values), ["run"], unchecked)
    assert "model type (one of qwen3_moe, " in text
    assert f"), shapes and memory not checked: {name}: its config.json is not on this machine" in text


def test_a_folder_without_a_models_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"policy.model_name={tmp_path}: the folder has no config.json"):
        fetch_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert fetch_model_config(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": {}}, "no `cluster` block"),
        ({"policy.model_name": "nowhere"}, "no config.json of policy.model_name on this machine"),
        (
            {"cluster": {}, "policy.model_name": "nowhere"},
            "no `cluster` block and no config.json of policy.model_name on this machine",
        ),
    ],
)
def test_a_summary_says_what_memory_is_not_computed_without(changes, said):
    values = launch(**changes)
    text = launch_summary(values, apply_qarl(values), ["run"], None)
    assert f"memory   not computed: {said}\n" in text


def test_a_broken_config_of_a_model_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: expected .*, an object"):
        apply_qarl(launch(**{"policy.model_name": str(tmp_path)}))


FEWER = "policy.hf_config_overrides"


def test_a_model_of_fewer_layers_is_computed_as_such():
    whole, few = launch(), launch(**{FEWER: {"num_hidden_layers": 12}})
    needed = [
        needed_memory(values, NemoQarlConfig(keep_operand=False), optimizer_stays=False) for values in (whole, few)
    ]
    # Embedding and head are in both: 622 M of the 30.5 B parameters, 2 bytes each, over TP2.
    tables = 2 * 622e6 / 2
    weights = [one.learner.parts["weights"] - tables for one in needed]
    assert weights[1] == pytest.approx(weights[0] / 4, rel=1e-3)
    assert "does not divide the 12 layers" in "".join(
        problems(launch(**{FEWER: {"num_hidden_layers": 12}, "policy.megatron_cfg.pipeline_model_parallel_size": 8}))
    )


def test_a_model_that_cannot_be_is_one_line_that_names_what_changed_it():
    (line,) = problems(launch(**{FEWER: {"num_hidden_layers": "few"}}))
    assert "with policy.hf_config_overrides={'num_hidden_layers': 'few'}: num_hidden_layers" in line
