"""What a training step leaves to be reported: metrics, readable examples, and files of diagnostics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl_nemo.metrics.diagnostics import DiagnosticsCollector, make_example
from qarl_nemo.metrics.error_tokens import error_token_mask, error_token_rates
from qarl_nemo.metrics.mismatch import mismatch_metrics
from qarl_nemo.train.learner import UpdateResult
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.tasks import Task

_NUM_EXAMPLES = 8
_QUANTILES = (0.01, 0.5, 0.99)
# Bytes of a character in UTF-8, and so its tokens, at most.
_CHARACTER_TOKENS = 4


@dataclass(frozen=True)
class FinishedStep:
    """A training step after its update.

    Attributes:
        tasks: B tasks.
        rollouts: B responses.
        rewards: [B] FP32.
        prev_logprobs: [B, R] FP32.
        advantages: [B] FP32.
        result: what the update returned.
    """

    tasks: Sequence[Task]
    rollouts: Rollouts
    rewards: Tensor
    prev_logprobs: Tensor
    advantages: Tensor
    result: UpdateResult

    @cached_property
    def error_mask(self) -> Tensor:
        """[B, R] bool, true for error tokens."""
        rollouts = self.rollouts
        tokens = rollouts.input_ids[:, rollouts.num_prompt_columns :]
        return error_token_mask(self.prev_logprobs, rollouts.generation_logprobs, tokens, rollouts.response_mask)

    @property
    def token_advantages(self) -> Tensor:
        """[B, R] FP32, each token's advantage."""
        return self.advantages[:, None].expand_as(self.prev_logprobs)

    def metrics(self) -> dict[str, float]:
        """Collect the step's flat metrics, except timings."""
        rollouts, sequences, mask = self.rollouts, self.result.sequences, self.rollouts.response_mask
        ratios = sequences["prox_ratio"][sequences["valid"]].float()
        shares = torch.tensor(_QUANTILES, device=ratios.device)
        # Where every response is empty there is none.
        quantiles = torch.quantile(ratios, shares).tolist() if len(ratios) else [math.nan] * len(_QUANTILES)
        return {
            "reward/mean": float(self.rewards.mean()),
            "reward/std": float(self.rewards.std()),
            "response_length_tokens/mean": float(mask.sum(-1).float().mean()),
            "truncated_fraction": float(rollouts.truncated.float().mean()),
            # Of the policy that sampled, noise on its norms included, whatever the learner runs.
            "rollout/entropy_estimate": -float(rollouts.generation_logprobs[mask].mean()),
            **self.result.metrics,
            **dict(zip(("prox_ratio/p01", "prox_ratio/p50", "prox_ratio/p99"), quantiles, strict=True)),
            **mismatch_metrics(self.prev_logprobs, rollouts.generation_logprobs, mask),
            **error_token_rates(self.error_mask, mask, self.token_advantages),
        }

    def write_diagnostics(self, run_dir: Path, step: int, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the step's ratios, a sample of its tokens, and examples, with a tokenizer that decodes them."""
        collector = DiagnosticsCollector(step)
        collector.add(
            self.result.sequences,
            prev_logprobs=self.prev_logprobs,
            curr_logprobs=self.result.curr_logprobs,
            generation_logprobs=self.rollouts.generation_logprobs,
            advantages=self.token_advantages,
            token_mask=self.rollouts.response_mask,
            error_mask=self.error_mask,
        )
        # The responses with the most error tokens, then the first ones.
        rows = self.error_mask.sum(-1).argsort(descending=True, stable=True)[:_NUM_EXAMPLES].tolist()
        collector.write(run_dir, [self._example(row, tokenizer) for row in rows])

    def _example(self, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        rollouts, first = self.rollouts, self.rollouts.num_prompt_columns
        length = int(rollouts.response_mask[row].sum())
        return make_example(
            prompt=tokenizer.decode(rollouts.input_ids[row, :first][rollouts.attention_mask[row, :first]]),
            tokens=token_texts(tokenizer, rollouts.input_ids[row, first : first + length].tolist()),
            answer=self.tasks[row].answer,
            reward=float(self.rewards[row]),
            advantage=float(self.advantages[row]),
            error_mask=self.error_mask[row, :length].tolist(),
            prev_logprobs=self.prev_logprobs[row, :length].tolist(),
            generation_logprobs=rollouts.generation_logprobs[row, :length].tolist(),
        )


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Return the text that each token adds to those before it; joined they are the decoded response.

    A token alone may decode to another text: some decoders drop a first space, and a character may take several tokens,
    of which the last one gets it.
    """

    def decoded(end: int) -> str:
        return str(tokenizer.decode(tokens[start:end]))

    texts, start, read = [""] * len(tokens), 0, 0
    for end in range(1, len(tokens) + 1):
        before, after = decoded(read), decoded(end)
        settled, text = end, after
        if end < len(tokens) and (len(after) <= len(before) or after.endswith("\ufffd")):
            # Half a character may follow. What garbage holds before it stays as it is: read once, not once a token.
            settled = end - _CHARACTER_TOKENS
            if settled - read < _CHARACTER_TOKENS:
                continue
            text = decoded(settled)
            if not after.startswith(text):
                continue
        texts[settled - 1] = text[len(before) :]
        start, read = read, settled
    return texts


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
