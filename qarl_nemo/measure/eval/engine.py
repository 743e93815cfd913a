"""What an engine of evaluations answers."""

from dataclasses import dataclass


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
