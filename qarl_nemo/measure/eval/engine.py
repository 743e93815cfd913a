"""What an evaluation asks of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qarl_nemo.train.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        text: decoded, without special tokens.
        num_tokens: its length, the end token included.
        truncated: whether it was cut off at the longest length.
    """

    text: str
    num_tokens: int
    truncated: bool


class AnswerEngine(Protocol):
    """Serves one model."""

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """Sample one answer to each prompt.

        Args:
            prompts: token ids.
            params: how to draw.
            seeds: one for each answer; the same call gives the same answers.

        Returns:
            The answers, in the prompts' order.
        """
        ...

    def close(self) -> None:
        """End it, which frees its memory."""
        ...
