"""Takes log-probabilities out of vLLM's answers at once; NeMo-RL's worker writes them into a tensor one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def logprobs_apart(llm: Any) -> Iterator[list[list[float]]]:
    """Keep log-probabilities out of an engine's answers while it lasts, and collect them.

    Args:
        llm: vLLM's `LLM`, whose `generate` is called once.

    Yields:
        For each answer, its tokens' log-probabilities (nats); 0 for a token that has none.
    """
    taken: list[list[float]] = []
    generate = llm.generate

    def generate_apart(*arguments: Any, **named: Any) -> Any:
        outputs = generate(*arguments, **named)
        for output in outputs:
            answer = output.outputs[0]
            pairs = zip(answer.token_ids, answer.logprobs or (), strict=False)
            taken.append([_of_token(token, found) for token, found in pairs])
            answer.logprobs = None
        return outputs

    llm.generate = generate_apart
    try:
        yield taken
    finally:
        llm.generate = generate


def _of_token(token: int, found: Any) -> float:
    sampled = found.get(token) if found else None
    return 0.0 if sampled is None else sampled.logprob


def write_logprobs(logprobs: Tensor, taken: Sequence[Sequence[float]], prompt_lengths: Tensor) -> None:
    """Write each answer's log-probabilities behind its prompt.

    Args:
        logprobs: [B, T] FP32 (nats), changed in place.
        taken: B answers' log-probabilities.
        prompt_lengths: [B] tokens.
    """
    for row, values, begin in zip(logprobs, taken, prompt_lengths.tolist(), strict=True):
        row[begin : begin + len(values)] = torch.tensor(values, dtype=logprobs.dtype)
