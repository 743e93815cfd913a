"""Checks of NeMo-RL's training loop: batches, asynchronous steps, validation and the loaders of prompts."""

import os
from collections.abc import Mapping
from typing import Any

from qarl_nemo.losses.config import LossConfig
from qarl_nemo.nemo_rl.checks.lines import problem_line, yaml_text
from qarl_nemo.nemo_rl.layout import read_layout, responses_per_step
from qarl_nemo.nemo_rl.lookup import ABSENT, look_up
from qarl_nemo.parallelism import either

# NeMo-RL's environment variable that takes different batch sizes with much tensor parallelism.
_ANY_BATCH = "NRL_IGNORE_TP_ACCURACY_CHECK"
# What NeMo-RL's asynchronous loop does not implement.
_SYNCHRONOUS = (
    "grpo.use_dynamic_sampling",
    "grpo.reward_scaling.enabled",
    "grpo.reward_shaping.enabled",
    "data.use_multiple_dataloader",
)


def loop_conflicts(config: Mapping[str, Any], objective: LossConfig) -> list[str]:
    """Say which settings of GRPO's loop do not go together: batches, asynchronous steps, validation, loaders.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        objective: the run's.

    Returns:
        One line each: key, value, why, and what to set.
    """
    problems = []
    policy, per_step = config.get("policy") or {}, responses_per_step(config)
    batch, key = policy.get("train_global_batch_size"), "policy.train_global_batch_size"
    forced = look_up(config, "loss_fn.force_on_policy_ratio", False)
    if per_step and batch and per_step % batch:
        layout = read_layout(config)
        ranks = max(1, layout.data_parallel) if layout else 1
        sizes = [per_step // n for n in range(1, 17) if per_step % n == 0]
        # Without one that data parallel ranks divide, the step itself is refused.
        legal = [str(size) for size in sizes if size % ranks == 0] or [str(size) for size in sizes]
        problems.append(
            problem_line(key, batch, f"does not divide the {per_step} responses of a step", " or ".join(legal))
        )
    elif per_step and batch and batch != per_step and (forced or objective.objective == "on_policy_grpo"):
        cause = "loss_fn.force_on_policy_ratio" if forced else "qarl.objective on_policy_grpo"
        problems.append(
            problem_line(key, batch, f"{cause} is right for one optimizer step a rollout batch", str(per_step))
        )
    if look_up(config, "grpo.async_grpo") is None:
        problems.append(problem_line("grpo.async_grpo", None, "NeMo-RL reads its keys", "enabled: false in it"))
    if look_up(config, "grpo.async_grpo.enabled", False):
        problems += _async_conflicts(config, objective)
    problems += _validation_conflicts(config)
    problems += _unpaired(config)
    tensor_parallel = look_up(config, "policy.megatron_cfg.tensor_model_parallel_size", 1)
    micro, scored = policy.get("train_micro_batch_size"), policy.get("logprob_batch_size")
    # NeMo-RL asks for it where neither of these says otherwise.
    unchecked = forced or os.environ.get(_ANY_BATCH)
    if tensor_parallel >= 4 and not unchecked and None not in (micro, scored) and micro != scored:
        why = f"NeMo-RL wants policy.train_micro_batch_size with tensor_model_parallel_size={tensor_parallel}"
        problems.append(problem_line("policy.logprob_batch_size", scored, why, str(micro)))
    return problems


def _async_conflicts(config: Mapping[str, Any], objective: LossConfig) -> list[str]:
    # NeMo-RL refuses these itself, but only after all workers have started.
    wanted = {
        "policy.generation.colocated.enabled": (False, "generation needs GPUs of its own"),
        "policy.generation.vllm_cfg.async_engine": (True, "generation runs beside training"),
    }
    if not objective.corrects_mismatch:
        why = f"qarl.objective {objective.objective} has no mismatch weight for responses of older weights"
        return [problem_line("grpo.async_grpo.enabled", True, why, "false, or choose another objective")]
    wanted["loss_fn.use_importance_sampling_correction"] = (True, "the objective's mismatch weight is that correction")
    given = {
        key: (False, "that loop of NeMo-RL has none") for key in _SYNCHRONOUS if look_up(config, key) is not ABSENT
    }
    problems = [
        problem_line(key, value, f"grpo.async_grpo.enabled=true: {why}", yaml_text(legal))
        for key, (legal, why) in (wanted | given).items()
        if (value := look_up(config, key, not legal)) != legal
    ]
    oldest = "grpo.async_grpo.max_trajectory_age_steps"
    if type(age := look_up(config, oldest, 1)) is not int or age < 1:
        # NeMo-RL's buffer would hold no response.
        problems.append(problem_line(oldest, age, "responses of how many steps before are kept", "1 or more"))
    return problems


def _unpaired(config: Mapping[str, Any]) -> list[str]:
    """Return keys without those that NeMo-RL asserts beside them, once Ray has started."""
    problems = []
    factor, dynamic = look_up(config, "grpo.batch_multiplier", 1), "grpo.use_dynamic_sampling"
    if factor != 1 and not look_up(config, dynamic, False):
        problems.append(problem_line("grpo.batch_multiplier", factor, f"it is for {dynamic}=true", "1"))
    elif look_up(config, dynamic, False):
        most = "grpo.dynamic_sampling_max_gen_batches"
        if type(batches := look_up(config, most, 1)) is not int or batches < 1:
            problems.append(problem_line(most, batches, f"{dynamic}=true generates at least one", "1 or more"))
    problems += _loader_conflicts(config, factor or 1)
    metric, least = "grpo.stop_at_validation_metric", "grpo.stop_at_validation_threshold"
    if look_up(config, metric, None) is not None and look_up(config, least, None) is None:
        problems.append(problem_line(least, None, f"{metric} stops there", f"a number, or {metric}=null"))
    return problems


def _loader_conflicts(config: Mapping[str, Any], factor: float) -> list[str]:
    several, size = "data.use_multiple_dataloader", "data.num_prompts_per_dataloader"
    # The asynchronous loop has none of it.
    if not look_up(config, several, False) or look_up(config, "grpo.async_grpo.enabled", False):
        return []
    prompts, each = look_up(config, "grpo.num_prompts_per_step", 0) or 0, look_up(config, size, 0)
    # Of both NeMo-RL takes so many times as many for dynamic sampling, in whole numbers.
    taken = int(prompts * factor)
    legal = [count for count in range(1, prompts + 1) if (part := int(count * factor)) and taken % part == 0]
    if not prompts or (type(each) is int and each in legal):
        return []
    why = f"{several}=true takes so many prompts of a set at once, and {prompts} a step"
    why += f", times grpo.batch_multiplier={factor}" if factor != 1 else ""
    return [problem_line(size, each or None, why, either(legal))]


def _validation_conflicts(config: Mapping[str, Any]) -> list[str]:
    generation = look_up(config, "policy.generation", {})
    return [
        problem_line(
            f"policy.generation.val_{key}",
            value,
            "NeMo-RL samples its validation as it samples for training",
            yaml_text(training),
        )
        for key in ("temperature", "top_p", "top_k")
        if (value := look_up(generation, f"val_{key}")) is not ABSENT
        and value != (training := look_up(generation, key, None))
    ]
