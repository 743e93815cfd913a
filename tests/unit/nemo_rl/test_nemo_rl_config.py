"""The `qarl:` block beside NeMo-RL's keys: every conflict is one error, and workers find the block where they look."""

import copy
from pathlib import Path

import pytest

from qarl_nemo.config import ConfigError
from qarl_nemo.muon import MEGATRON
from qarl_nemo.nemo_rl.checks.hints import find_hints
from qarl_nemo.nemo_rl.config import apply_qarl

QWEN3_30B = str(Path(__file__).parents[3] / "examples" / "models" / "qwen3-30b-a3b")


def config(qarl=None, **changes) -> dict:
    """What NeMo-RL's Qwen3-30B recipe says of the keys that matter, with dotted changes."""
    values = {
        "qarl": {"format": "w4a16"} if qarl is None else qarl,
        "grpo": {"num_prompts_per_step": 64, "num_generations_per_prompt": 8, "async_grpo": {"enabled": False}},
        "loss_fn": {"ratio_clip_min": 0.2, "token_level_loss": True, "use_importance_sampling_correction": False},
        "policy": {
            "model_name": QWEN3_30B,
            "precision": "bfloat16",
            "train_global_batch_size": 128,
            "train_micro_batch_size": 1,
            "logprob_batch_size": 4,
            "dtensor_cfg": {"enabled": False},
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
                "expert_model_parallel_size": 8,
                "moe_token_dispatcher_type": "alltoall",
                "moe_router_load_balancing_type": "none",
                "moe_shared_expert_overlap": False,
                "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True},
                "distributed_data_parallel_config": {"overlap_param_gather": True},
            },
            "generation": {
                "backend": "vllm",
                "colocated": {"enabled": True},
                "temperature": 1.0,
                "val_temperature": 1.0,
                "vllm_cfg": {"precision": "bfloat16", "tensor_parallel_size": 1, "async_engine": False},
                "vllm_kwargs": {"moe_backend": "marlin"},
            },
        },
    }
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        block = values
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    return values


def problems(values) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        apply_qarl(values)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_workers_find_the_block_as_plain_values():
    values = config({"format": "fp8_block", "targets": ["experts", "attention"]},
                    **{"policy.generation.vllm_kwargs": {"moe_backend": "triton"}})  # fmt: skip
    qarl = apply_qarl(values)
    for block in (values["policy"]["qarl"], values["policy"]["generation"]["qarl"]):
        assert block["format"] == "fp8_block"
        assert block["targets"] == ["experts", "attention"]
        assert block["objective"]["objective"] == "tbpo"
        assert block["router_replay"] is False
    assert qarl.objective.mismatch_cap == 2.0
    assert values["policy"]["generation"]["quant_cfg"] == "qarl"


def test_applying_twice_changes_nothing():
    values = config()
    first = apply_qarl(values)
    once = copy.deepcopy(values)
    assert apply_qarl(values) == first
    assert values == once


def test_router_replay_follows_nemo_rls_key():
    assert apply_qarl(config(**{"policy.router_replay": {"enabled": True}})).router_replay is True


def test_a_config_without_the_block_does_not_start():
    values = config()
    del values["qarl"]
    with pytest.raises(ConfigError, match="no `qarl:` block"):
        apply_qarl(values)


def test_layers_that_a_checkpoint_does_not_have_are_refused():
    apply_qarl(config(**{"policy.hf_config_overrides": {"num_hidden_layers": 48}}))
    (line,) = problems(config(**{"policy.hf_config_overrides": {"num_hidden_layers": 50}}))
    assert line.endswith("the checkpoint has 48 layers; set num_hidden_layers to at most 48")


def test_a_data_set_of_ours_that_cannot_be_read_is_refused_before_ray_starts():
    ours = {"dataset_name": "qarl_nemo.nemo_rl.problems.GSM8K", "processor": "math_hf_data_processor"}
    data = {
        "train": [ours | {"data_path": "nowhere/a.jsonl"}, ours | {"split": 3}, ours],
        "validation": ours | {"answer_format": "hashh"},
        "default": {"dataset_name": "OpenMathInstruct-2"},
    }
    found = [line for line in problems(config({"format": "w4a16"}, data=data)) if line.startswith("data.")]
    assert [line.partition(":")[0] for line in found] == ["data.train.1", "data.validation", "data.train.0.data_path"]
    assert "hashh" in found[1]


def test_a_target_that_is_named_twice_counts_once():
    assert apply_qarl(config({"targets": ["attention", "experts", "attention"]})).targets == ("experts", "attention")


def test_an_unknown_key_names_the_nearest_legal_one():
    assert "did you mean 'format'" in problems(config({"fromat": "w4a16"}))[0]


CONFLICTS = {
    "policy.megatron_cfg.enabled": False,
    "policy.dtensor_cfg.enabled": True,
    "policy.precision": "float32",
    "policy.quant_cfg": "NVFP4_DEFAULT_CFG",
    "policy.megatron_cfg.fp8_cfg": {"enabled": True},
    "policy.megatron_cfg.peft": {"enabled": True},
    "policy.generation.backend": "sglang",
    "policy.generation.quant_cfg": "NVFP4_DEFAULT_CFG",
    "policy.generation.refit_transport": "nixl",
    "policy.generation.vllm_cfg.precision": "fp8",
    "policy.generation.vllm_cfg.kv_cache_dtype": "fp8",
    "policy.generation.vllm_cfg.use_deep_gemm": True,
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": 1,
    "policy.generation.vllm_kwargs.hf_overrides": {"rope_theta": 1.0},
    "policy.generation.vllm_kwargs.quantization": "fp8",
    "policy.generation.vllm_kwargs.moe_backend": "triton",
    "policy.hf_config_overrides": {"quantization_config": {}},
    "policy.generation.val_temperature": 0.6,
    "policy.generation.bad_words": ["no"],
    "data_plane": {"enabled": True},
    "loss_fn.ratio_clip_min": 3e-4,
    "loss_fn.sequence_level_importance_ratios": True,
    "loss_fn.positive_clip_high": 4e-4,
    "loss_fn.force_on_policy_ratio": True,
    "policy.train_global_batch_size": 100,
    "policy.megatron_cfg.tensor_model_parallel_size": 4,
    "grpo.async_grpo.enabled": True,
    "policy.megatron_cfg.optimizer.optimizer": "dist_muon",
    "policy.megatron_cfg.moe_shared_expert_overlap": True,
    "policy.megatron_cfg.moe_router_load_balancing_type": "seq_aux_loss",
    "policy.megatron_cfg.moe_token_dispatcher_type": "flex",
    "policy.generation.vllm_cfg.tensor_parallel_size": 4,
}


# Where the key to change is another one.
CHANGE_INSTEAD = {
    "policy.megatron_cfg.optimizer.optimizer": "use_distributed_optimizer",
    "policy.megatron_cfg.tensor_model_parallel_size": "policy.logprob_batch_size",
    "loss_fn.force_on_policy_ratio": "policy.train_global_batch_size",
    "grpo.async_grpo.enabled": "policy.generation.colocated.enabled",
}


@pytest.mark.parametrize("key", CONFLICTS)
def test_each_conflict_is_an_error_that_says_what_to_set(key):
    lines = problems(config(**{key: CONFLICTS[key]}))
    named = CHANGE_INSTEAD.get(key, key.rpartition(".")[2])
    assert any(named in line for line in lines), lines


def test_all_conflicts_come_in_one_error():
    # Some changes hide others: another model layout, another transport.
    chosen = ["policy.precision", "policy.quant_cfg", "loss_fn.ratio_clip_min", "policy.generation.vllm_cfg.precision",
              "policy.megatron_cfg.moe_shared_expert_overlap", "policy.train_global_batch_size"]  # fmt: skip
    lines = problems(config(**{key: CONFLICTS[key] for key in chosen}))
    assert len(lines) == len(chosen)


@pytest.mark.parametrize(
    ("qarl", "line"),
    [
        ({"format": "w7a16"}, "qarl.format=w7a16: vLLM takes no refits of it; set w4a16 or"),
        (
            {"update_aware_scale": 1.5, "alignment": "none", "format": "bf16"},
            "qarl.update_aware_scale=1.5: it speeds up quantized weights",
        ),
        ({"format": "w4a8", "group_size": 64}, "qarl.group_size=64"),
        ({"format": "fp8_block", "group_size": 128}, "takes no group_size=128"),
        ({"schedule": [{"from_step": 9, "bits": 8}]}, "schedule: 8 bits are not stored in the 4 of w4a16"),
        ({"format": "fp8_block", "nested_in": "w8a16"}, "takes no nested_in=w8a16"),
        ({"targets": ["mlp"]}, "a qwen3_moe model has no mlp"),
        ({"targets": ["attention"]}, "qarl.targets=['attention']: the learner aligns a MoE model's experts"),
        ({"router_replay": True}, "qarl.router_replay=true: policy.router_replay.enabled=false"),
        ({"objective": {"objective": "on_policy_grpo"}}, "policy.train_global_batch_size=128"),
    ],
)
def test_what_the_block_asks_for_is_held_against_the_rest(qarl, line):
    values = config(qarl, **{"policy.generation.vllm_kwargs": {}})
    assert any(line in found for found in problems(values))


@pytest.mark.parametrize(
    ("qarl", "changes", "line"),
    [
        (
            {"schedule": [{"from_step": 9, "bits": 2}]},
            {"grpo.async_grpo.enabled": True},
            "grpo.async_grpo.enabled=true: qarl.schedule would train responses of older weights",
        ),
        (
            {"schedule": [{"from_step": 9, "bits": 2, "reset_moments": True}]},
            {"policy.megatron_cfg.optimizer.optimizer_cpu_offload": True},
            "optimizer_cpu_offload=true: qarl.schedule forgets moments",
        ),
        (
            {"update_aware_scale": 1.5},
            {"policy.megatron_cfg.optimizer.optimizer": "sgd"},
            "qarl.update_aware_scale=1.5: SGD's steps grow",
        ),
    ],
)
def test_stages_and_update_aware_rates_need_an_optimizer_and_a_loop_that_can(qarl, changes, line):
    assert any(line in found for found in problems(config(qarl, **changes)))
    apply_qarl(config(qarl))


def test_an_objective_without_mismatch_weight_does_not_take_older_responses():
    for objective in ({"objective": "gspo"}, {"objective": "grpo_tis", "mismatch_cap": None}):
        values = config({"objective": objective}, **{"grpo.async_grpo.enabled": True})
        expected = f"{objective['objective']} has no mismatch weight"
        assert any(expected in line for line in problems(values))


ASYNCHRONOUS = {
    "grpo.async_grpo.enabled": True,
    "policy.generation.colocated.enabled": False,
    "policy.generation.vllm_cfg.async_engine": True,
    "loss_fn.use_importance_sampling_correction": True,
}


def test_asynchronous_generation_needs_gpus_of_its_own():
    lines = problems(config(**{"grpo.async_grpo.enabled": True}))
    assert [line.partition("=")[0] for line in lines] == [
        "policy.generation.colocated.enabled",
        "policy.generation.vllm_cfg.async_engine",
        "loss_fn.use_importance_sampling_correction",
    ]
    apply_qarl(config(**ASYNCHRONOUS))


@pytest.mark.parametrize("age", [0, -1, None])
def test_asynchronous_responses_are_a_step_old_at_least(age):
    key = "grpo.async_grpo.max_trajectory_age_steps"
    (line,) = problems(config(**ASYNCHRONOUS | {key: age}))
    assert line.startswith(
        f"{key}={'null' if age is None else age}: responses of how many steps before are kept; set 1"
    )
    apply_qarl(config(**ASYNCHRONOUS | {key: 2}))
    # It is not read without.
    apply_qarl(config(**{key: age}))


def test_what_the_asynchronous_loop_has_not_is_refused_before_workers_start():
    # NeMo-RL's launcher raises for these once all of them run; absent or off they are legal, as above.
    changes = {
        "grpo.use_dynamic_sampling": True,
        "grpo.reward_scaling": {"enabled": True},
        "grpo.reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0.5},
        "data.use_multiple_dataloader": True,
    }
    lines = problems(config(**ASYNCHRONOUS | changes))
    assert [line.partition("=")[0].removesuffix(".enabled") for line in lines] == list(changes)
    assert all("grpo.async_grpo.enabled=true: that loop of NeMo-RL has none; set false" in line for line in lines)
    off = {"grpo.use_dynamic_sampling": False, "grpo.reward_scaling": {"enabled": False}}
    apply_qarl(config(**ASYNCHRONOUS | off))
    apply_qarl(config(**changes | {"data.num_prompts_per_dataloader": 32}))


def test_shards_that_a_kernel_does_not_take_are_named_with_their_layout():
    # 768 rows of an expert on four ranks are 192 each, no multiple of the group.
    lines = problems(config(**{"policy.generation.vllm_cfg.tensor_parallel_size": 4}))
    assert any("tensor_parallel_size=4: down_proj" in line for line in lines)
    whole_experts = {"tensor_parallel_size": 4, "expert_parallel_size": 4, "precision": "bfloat16"}
    apply_qarl(config(**{"policy.generation.vllm_cfg": whole_experts}))


def test_slow_settings_are_hints():
    assert find_hints(config()) == []
    packed = {"policy.sequence_packing.enabled": True}
    eager = {"policy.generation.vllm_cfg.enforce_eager": True}
    found = find_hints(config(**packed, **eager))
    assert [hint.partition("=")[0] for hint in found] == ["policy.sequence_packing.fuse_loss", next(iter(eager))]
    assert find_hints(config(**packed, **{"policy.sequence_packing.fuse_loss": True})) == []


def test_a_forward_that_one_update_a_step_does_not_need_is_a_hint():
    once = {"policy.train_global_batch_size": 512}
    (hint,) = find_hints(config(**once))
    assert hint.startswith("loss_fn.force_on_policy_ratio=false: a step is one update")
    assert "set true" in hint
    # What it asks for is legal.
    apply_qarl(config(**once, **{"loss_fn.force_on_policy_ratio": True}))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_fn.force_on_policy_ratio": True},
        {"policy.train_global_batch_size": 256},
        {"policy.train_global_batch_size": None},
        {"grpo.num_prompts_per_step": 128},
        # With these NeMo-RL computes log-probabilities before the update all the same, or refuses to go without.
        {"grpo.seq_logprob_error_threshold": 2.0},
        {"loss_fn.use_kl_in_reward": True},
    ],
)
def test_a_forward_that_is_needed_or_left_out_gets_no_hint(changes):
    assert find_hints(config(**{"policy.train_global_batch_size": 512} | changes)) == []


def test_a_secret_that_nemo_rl_would_print_is_a_hint_without_its_value():
    variables = {"policy.megatron_cfg.env_vars": {"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO"}}
    (hint,) = find_hints(config(**variables))
    assert hint.startswith("policy.megatron_cfg.env_vars.HF_TOKEN looks like a secret")
    assert "hf_abc" not in hint


def test_another_muon_than_all_learners_have_is_a_hint_with_what_to_set():
    block = {"optimizer": "dist_muon", "use_distributed_optimizer": False}
    (hint,) = find_hints(config(**{"policy.megatron_cfg.optimizer": block}))
    assert "muon_extra_scale_factor=0.2" in hint
    assert "muon_nesterov=true" in hint
    whole = block | MEGATRON
    assert find_hints(config(**{"policy.megatron_cfg.optimizer": whole})) == []
    (hint,) = find_hints(config(**{"policy.megatron_cfg.optimizer": whole | {"muon_momentum": 0.9}}))
    assert hint.endswith("for that one set muon_momentum=0.95")


def test_what_this_package_adds_to_the_data_block_is_checked():
    datasets = [{"reward_function": "os:getcwd"}, {"reward_function": "no_such_rewards:score"}]
    changes = {"data.overlong_prompts": "drop", "data.train": datasets, "env.reward_function": {"num_workers": 0}}
    changes["grpo.val_period"] = 0
    found = problems(config(**changes))
    assert [line.partition(": ")[0] for line in found] == [
        "data.overlong_prompts=drop",
        "data.train.0.reward_function=os:getcwd",
        "data.train.1.reward_function=no_such_rewards:score",
        "env.reward_function.num_workers=0",
    ]
    assert "set error or skip or mask" in found[0]
    assert "module no_such_rewards cannot be imported" in found[2]
