"""What the optimizer's state takes on a GPU, and whether it stays beside an engine there."""

import json
from dataclasses import replace

import pytest
import torch
from test_layout import SHARE, WHOLE_NODES, launch, on_a_host_without_gpus  # noqa: F401 for every test
from test_nemo_rl_config import problems

from qarl_nemo.config import ConfigError
from qarl_nemo.memory import GIB, Learner, ModelSize, Parallelism, rank_memory
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.budgets import largest_share
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.layout_memory import needed_memory
from qarl_nemo.nemo_rl.optimizer_dtypes import with_torch_dtypes

ADAM = {"optimizer": "adam", "use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
BF16_MOMENTS = ADAM | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
OPTIMIZER = "policy.megatron_cfg.optimizer"


def test_an_optimizer_that_is_too_large_may_have_smaller_moments():
    sizes = {"policy.train_micro_batch_size": 2, "policy.logprob_batch_size": 1}
    (line,) = problems(launch(**{OPTIMIZER: ADAM} | sizes))
    assert "exp_avg_dtype=bfloat16, exp_avg_sq_dtype=bfloat16 in policy.megatron_cfg.optimizer" in line
    for moments in (BF16_MOMENTS, BF16_MOMENTS | {"exp_avg_dtype": "float16"}):
        apply_qarl(launch(**{OPTIMIZER: moments} | sizes))


@pytest.mark.parametrize(("optimizer", "parameter_bytes"), [("adam", 12), ("muon", 8.29), ("sgd", 8)])
def test_an_optimizer_that_is_not_distributed_is_whole_on_every_rank(optimizer, parameter_bytes):
    said = {"optimizer": optimizer, "use_distributed_optimizer": False}
    values = launch(**{OPTIMIZER: said, "cluster": {"num_nodes": 2, "gpus_per_node": 8}})
    parts = needed_memory(values, NemoQarlConfig.model_validate(values["qarl"]), optimizer_stays=False).learner.parts
    assert parts["optimizer"] == pytest.approx(parts["weights"] / 2 * parameter_bytes, rel=1e-3)
    assert optimizer != "adam" or any("use_distributed_optimizer=true (of" in line for line in problems(values))


# What Megatron-core 0.20 and Emerging-Optimizers 0.3.0 held of this model in FP32 masters and state after a step.
HELD_BYTES = {
    "adam": 10_256_640,
    "muon": 6_914_304,
    "adaptive_muon": 10_256_640,
    "normuon": 6_940_928,
    "lion": 6_906_112,
    "soap": 26_051_840,
    # Of another model, in Megatron-core 0.16.1: 4 + 4 bytes a parameter, master and momentum; here are 854_720.
    "sgd": 6_837_760,
}
TINY = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 128, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


def state_bytes(tmp_path, optimizer) -> float:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    layout = {f"policy.megatron_cfg.{name}": 1 for name in ("tensor_model_parallel_size", "expert_model_parallel_size")}
    said = {OPTIMIZER: optimizer | {"use_distributed_optimizer": False}, "policy.model_name": str(tmp_path)}
    values = launch(**said | layout | {"cluster": {"num_nodes": 1, "gpus_per_node": 1}})
    qarl = NemoQarlConfig.model_validate(values["qarl"])
    return needed_memory(values, qarl, optimizer_stays=False).learner.parts["optimizer"]


@pytest.mark.parametrize("name", HELD_BYTES)
def test_every_optimizer_has_the_state_that_megatron_keeps(tmp_path, name):
    optimizer = {"optimizer": name}
    if name == "normuon":
        optimizer = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": name}
    assert state_bytes(tmp_path, optimizer) == pytest.approx(HELD_BYTES[name], rel=0.01)
    other = "soap" if name == "adam" else "adam"
    assert name == "adaptive_muon" or state_bytes(tmp_path, {"optimizer": other}) != pytest.approx(
        HELD_BYTES[name], rel=0.01
    )


def test_ranks_have_parts_of_soaps_matrices():
    model = ModelSize(num_layers=2, hidden=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=64, inner=128)
    model = replace(model, num_experts=8, top_k=2)

    def squares(ranks: Parallelism) -> float:
        held = [
            rank_memory(model, ranks, Learner(optimizer_whole=True, kronecker=one)).parts["optimizer"]
            for one in (True, False)
        ]
        return held[0] - held[1]

    dense = 2 * (128**2 + 128**2 + 64**2 + 128**2 + 8**2 + 128**2)
    experts = 2 * 8 * (256**2 + 128**2 + 128**2 + 128**2)
    assert squares(Parallelism(1)) == 8 * (dense + experts)
    assert squares(Parallelism(4, ep=4)) == 8 * (dense + experts / 4)
    halved = 2 * (64**2 + 128**2 + 32**2 + 128**2 + 8**2 + 128**2)
    assert squares(Parallelism(2, tp=2)) == 8 * (halved + experts)


def test_no_smaller_moments_are_advised_to_other_optimizers():
    said = {"optimizer": "soap", "use_distributed_optimizer": False}
    (line, *_) = [line for line in problems(launch(**{OPTIMIZER: said})) if line.startswith("memory: policy.train")]
    assert "exp_avg" not in line
    assert "use_distributed_optimizer" not in line


def test_parameters_can_leave_only_with_a_distributed_optimizer():
    found = []
    for distributed in (True, False):
        values = launch(**{OPTIMIZER: {"optimizer": "dist_muon", "use_distributed_optimizer": distributed}})
        found.append(needed_memory(values, NemoQarlConfig.model_validate(values["qarl"]), optimizer_stays=False))
    leave, stay = found
    assert (leave.kept, stay.host["parameters"]) == (0.0, 0.0)
    assert stay.kept == stay.learner.parts["weights"] < leave.host["parameters"]
    gpu_bytes = 79 * GIB
    shares = [largest_share(needed, gpu_bytes, optimizer_stays=False) for needed in found]
    assert shares[0] - shares[1] == pytest.approx(stay.kept / gpu_bytes, abs=0.01)


def test_an_optimizer_that_stays_has_to_fit_beside_the_engine():
    stays = {"policy.offload_optimizer_for_refit": False, OPTIMIZER: ADAM, "policy.logprob_batch_size": 1}
    refit, share = problems(launch(**stays))
    assert refit.startswith("policy.offload_optimizer_for_refit=false: a refit beside the optimizer's 43 GiB needs 70")
    assert share.startswith(
        "policy.offload_optimizer_for_refit=false: the optimizer's 43 GiB stay beside an engine of 0.6"
    )
    # 79 GiB without 43 of the optimizer and 6 of the learner's process.
    assert "gpu_memory_utilization to at most 0.38, or" in share
    _, said = problems(launch({"resident": True}, **{OPTIMIZER: ADAM, "policy.logprob_batch_size": 1}))
    assert said.startswith("qarl.resident=true: the optimizer's 43 GiB stay")
    fits = stays | {OPTIMIZER: BF16_MOMENTS}
    apply_qarl(launch(**fits))
    (line,) = problems(launch({"resident": False}, **fits))
    assert line.endswith("qarl.resident=false says the opposite; remove one of them")


@pytest.mark.parametrize(
    ("block", "changes", "stays"),
    [
        ({}, {}, False),
        ({}, {OPTIMIZER: BF16_MOMENTS}, True),
        ({"gpu_memory_gib": 139}, {}, True),
        ({"gpu_memory_gib": 139, "resident": False}, {}, False),
        ({"gpu_memory_gib": 139}, {"policy.offload_optimizer_for_refit": True}, False),
        ({"gpu_memory_gib": 139}, WHOLE_NODES, False),
        ({"gpu_memory_gib": 139, "format": "bf16", "alignment": "none"}, {"policy.generation.vllm_kwargs": {}}, False),
    ],
)
def test_the_optimizer_stays_where_it_fits_beside_the_engine(block, changes, stays):
    share = {SHARE: 0.5 if stays else 0.8}
    values = launch(block, **{OPTIMIZER: ADAM} | share | changes)
    assert apply_qarl(values).resident is stays
    assert values["policy"]["offload_optimizer_for_refit"] is not stays


def test_types_of_the_optimizers_state_are_named_as_torch_names_them():
    values = launch(**{OPTIMIZER: BF16_MOMENTS})
    apply_qarl(values)
    given = with_torch_dtypes(values["policy"])["megatron_cfg"]["optimizer"]
    assert given == BF16_MOMENTS | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    assert values["policy"]["megatron_cfg"]["optimizer"] == BF16_MOMENTS


def test_types_that_the_optimizer_does_not_keep_are_refused():
    lines = problems(
        launch(**{OPTIMIZER: {"optimizer": "adam", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bfloat16"}})
    )
    assert (
        f"{OPTIMIZER}.exp_avg_dtype=bf16: not a type that the optimizer keeps; set float32 or float16 or bfloat16"
        in lines
    )
    (needs,) = [line for line in lines if line.startswith(f"{OPTIMIZER}: exp_avg_dtype, exp_avg_sq_dtype: only")]
    assert needs.endswith(
        f"set {OPTIMIZER}.use_precision_aware_optimizer and {OPTIMIZER}.use_distributed_optimizer to true, or float32"
    )


def test_what_may_be_resident_is_one_line():
    with pytest.raises(
        ConfigError, match=r"1 problem.*\n  qarl.resident: Input should be True, False or 'auto' \(given 'maybe'\)$"
    ):
        apply_qarl(launch({"resident": "maybe"}))
