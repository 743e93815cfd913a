"""A training step's metrics and readable examples, from its tensors."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl_nemo.metrics.diagnostics import make_example
from qarl_nemo.metrics.error_tokens import error_token_mask, error_token_rates
from qarl_nemo.metrics.mismatch import mismatch_metrics
from qarl_nemo.train.learner import UpdateResult
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.tasks import Task

_NUM_EXAMPLES = 8


def step_metrics(
    rollouts: Rollouts, rewards: Tensor, prev_logprobs: Tensor, advantages: Tensor, result: UpdateResult
) -> dict[str, float]:
    """Collect one step's flat metrics, except timings.

    Args:
        rollouts: B responses.
        rewards: [B].
        prev_logprobs: [B, R] FP32.
        advantages: [B].
        result: what the update returned.
    """
    mask = rollouts.response_mask
    ratios = result.sequences["prox_ratio"][result.sequences["valid"]].float()
    quantiles = torch.quantile(ratios, torch.tensor([0.01, 0.5, 0.99], device=ratios.device)).tolist()
    error_mask = error_tokens(rollouts, prev_logprobs)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_length_tokens/mean": float(mask.sum(-1).float().mean()),
        "truncated_fraction": float(rollouts.truncated.float().mean()),
        # Of the policy that sampled, noise on its norms included, whatever the learner runs.
        "rollout/entropy_estimate": -float(rollouts.generation_logprobs[mask].mean()),
        **result.metrics,
        **dict(zip(("prox_ratio/p01", "prox_ratio/p50", "prox_ratio/p99"), quantiles, strict=True)),
        **mismatch_metrics(prev_logprobs, rollouts.generation_logprobs, mask),
        **error_token_rates(error_mask, mask, advantages[:, None].expand_as(prev_logprobs)),
    }


def mean_rewards(rewards: Sequence[float], tasks: Sequence[Task]) -> dict[str, float]:
    """Average the rewards of a validation.

    Returns:
        `validation/reward`, and `validation/reward_<set>` for each data set if there are several.
    """
    by_set: dict[str, list[float]] = {}
    for task, reward in zip(tasks, rewards, strict=True):
        by_set.setdefault(task.dataset, []).append(reward)
    means = {f"validation/reward_{name}": fmean(values) for name, values in by_set.items()} if len(by_set) > 1 else {}
    return {"validation/reward": fmean(rewards)} | means


def validation_answers(
    tasks: Sequence[Task], rollouts: Rollouts, texts: Sequence[str], rewards: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a validation's answers as `write_validation` takes them.

    Args:
        tasks: B tasks.
        rollouts: B responses.
        texts: their texts.
        rewards: what they earned.
    """
    lengths, truncated = rollouts.response_mask.sum(-1).tolist(), rollouts.truncated.tolist()
    return [
        {
            "dataset": task.dataset,
            "prompt": task.prompt,
            "answer": task.answer,
            "response": text,
            "reward": reward,
            "num_tokens": length,
            "truncated": cut,
        }
        for task, text, reward, length, cut in zip(tasks, texts, rewards, lengths, truncated, strict=True)
    ]


def diagnostics_examples(
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[Task],
    rollouts: Rollouts,
    rewards: Tensor,
    prev_logprobs: Tensor,
    advantages: Tensor,
) -> list[dict[str, Any]]:
    """Pick the responses with the most error tokens, then the first ones, as readable records.

    Args:
        tokenizer: decodes prompts and tokens.
        tasks: B tasks.
        rollouts: B responses.
        rewards: [B].
        prev_logprobs: [B, R] FP32.
        advantages: [B].

    Returns:
        At most eight records.
    """
    error_mask = error_tokens(rollouts, prev_logprobs)
    rows = error_mask.sum(-1).argsort(descending=True, stable=True)[:_NUM_EXAMPLES].tolist()
    first = rollouts.num_prompt_columns
    examples = []
    for row in rows:
        length = int(rollouts.response_mask[row].sum())
        prompt_ids = rollouts.input_ids[row, :first][rollouts.attention_mask[row, :first]]
        examples.append(
            make_example(
                prompt=tokenizer.decode(prompt_ids),
                tokens=[tokenizer.decode([token]) for token in rollouts.input_ids[row, first : first + length]],
                answer=tasks[row].answer,
                reward=float(rewards[row]),
                advantage=float(advantages[row]),
                error_mask=error_mask[row, :length].tolist(),
                prev_logprobs=prev_logprobs[row, :length].tolist(),
                generation_logprobs=rollouts.generation_logprobs[row, :length].tolist(),
            )
        )
    return examples


def error_tokens(rollouts: Rollouts, prev_logprobs: Tensor) -> Tensor:
    """Return [B, R] bool, true for the rollouts' error tokens; [B, R] FP32 logprobs of the learner are given."""
    tokens = rollouts.input_ids[:, rollouts.num_prompt_columns :]
    return error_token_mask(prev_logprobs, rollouts.generation_logprobs, tokens, rollouts.response_mask)
