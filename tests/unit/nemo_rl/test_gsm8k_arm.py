"""The recipe of the embedded engine's arm on GSM8K trains what that arm trains."""

from pathlib import Path
from typing import Any

import pytest

from qarl_kernels import get_format
from qarl_nemo.config import load_config
from qarl_nemo.data.benchmarks import BENCHMARKS
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.train.arms import expand_arms
from qarl_nemo.train.config import LocalConfig
from support.nemo_rl.recipes import own_settings

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
ARMS = load_config(CONFIGS / "local_gsm8k_arms.yaml", [], LocalConfig)
(ARM,) = (run for run in expand_arms(ARMS, "arms") if run.run.name == "QaRL w4a16-seed1")
# What the arms build on. They are tested on MATH-500, too, whose questions are longer; the recipe is not.
ALONE = load_config(CONFIGS / "local_gsm8k.yaml", [], LocalConfig)
RECIPE = own_settings(CONFIGS / "qarl-qwen2.5-coder-0.5b-1n2g-megatron-w4a16.yaml")


def expected() -> dict[str, Any]:
    """What the arm says, under NeMo-RL's keys."""
    grpo, optimizer, rollout = ARM.grpo, ARM.policy.optimizer, ARM.rollout
    return {
        "grpo.num_prompts_per_step": grpo.num_prompts_per_step,
        "grpo.num_generations_per_prompt": grpo.num_generations_per_prompt,
        "grpo.max_num_steps": grpo.max_num_steps,
        "grpo.seed": ARM.seed,
        "grpo.val_period": grpo.val_period,
        "grpo.max_val_samples": grpo.val_num_prompts - BENCHMARKS["math500"].num_problems,
        "policy.train_global_batch_size": grpo.train_global_batch_size,
        "policy.max_total_sequence_length": ALONE.rollout.max_model_len,
        "policy.generation.max_new_tokens": rollout.max_new_tokens,
        "policy.sequence_packing.train_mb_tokens": ARM.policy.sequence_packing.train_mb_tokens,
        "policy.sequence_packing.logprob_mb_tokens": ARM.policy.sequence_packing.logprob_mb_tokens,
        "policy.megatron_cfg.optimizer.lr": optimizer.lr,
        "policy.megatron_cfg.optimizer.weight_decay": optimizer.weight_decay,
        "policy.megatron_cfg.optimizer.adam_beta1": optimizer.betas[0],
        "policy.megatron_cfg.optimizer.adam_beta2": optimizer.betas[1],
        "data.max_input_seq_length": ALONE.data.max_input_seq_length,
        "policy.model_name": f"${{oc.env:PWD}}/{ARM.policy.model_path}",
        "data.train.data_path": f"${{oc.env:PWD}}/{ARM.data.train.data_path}",
        "data.validation.data_path": f"${{oc.env:PWD}}/{ARM.data.validation[0].data_path}",
    }


def test_batches_lengths_rates_data_and_seed_are_the_arms():
    assert {key: look_up(RECIPE, key) for key in expected()} == expected()
    # The embedded engine's baseline is the mean of the whole group.
    assert look_up(RECIPE, "grpo.use_leave_one_out_baseline") is False


def test_format_and_objective_are_the_arms():
    ours, arm = NemoQarlConfig(**RECIPE["qarl"]), ARM.qarl
    assert ours.objective == ARM.loss_fn
    assert (ours.alignment, ours.targets, ours.backward) == (arm.alignment, arm.targets, arm.backward)
    formats = [get_format(one.format, group_size=one.group_size) for one in (ours, arm)]
    assert formats[0] == formats[1]
    assert formats[0] != get_format(arm.format, group_size=64)


def warm_up(scheduler: dict[str, float]) -> list[tuple[float, float]]:
    """NeMo-RL's rate in each rollout batch, and the mean of the arm's over the same optimizer steps."""
    # Megatron's is constant after it, and changes once a rollout batch: first + (rate - first) * batches / warm-up. The
    # embedded engine's changes in each optimizer step: rate * (steps + 1) / warm-up, the steps being those done.
    rate, arm = look_up(RECIPE, "policy.megatron_cfg.optimizer")["lr"], ARM.policy.optimizer
    first, last = scheduler["lr_warmup_init"], scheduler["lr_warmup_iters"]
    updates = ARM.grpo.num_prompts_per_step * ARM.grpo.num_generations_per_prompt // ARM.grpo.train_global_batch_size
    assert updates == 4
    rates = []
    for batch in range(20):
        steps = range(batch * updates, (batch + 1) * updates)
        mean = sum(arm.lr * min((step + 1) / arm.warmup_steps, 1.0) for step in steps) / updates
        rates.append((first + (rate - first) * min(batch / last, 1.0), mean))
    return rates


def test_the_warm_up_is_the_arms_batch_by_batch():
    scheduler = look_up(RECIPE, "policy.megatron_cfg.scheduler")
    for megatron, mean in warm_up(scheduler):
        assert megatron == pytest.approx(mean, rel=0.05)
    # As if NeMo-RL's rate changed in each optimizer step, too.
    assert any(one != pytest.approx(mean, rel=0.05) for one, mean in warm_up(scheduler | {"lr_warmup_iters": 9}))
