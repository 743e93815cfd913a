"""Find the number in a batch that is not finite, to name it where a step is skipped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

FIELDS = ("curr_logprobs", "prev_logprobs", "generation_logprobs", "advantages", "reference_policy_logprobs")


@dataclass(frozen=True, slots=True)
class NonFinite:
    """One value on a valid token that is not finite.

    Attributes:
        response: which of the step's responses.
        token: which of its valid tokens, from 0.
        name: the tensor, one of `FIELDS`.
        value: `nan`, `inf` or `-inf`.
    """

    NOTHING: ClassVar[list[float]] = [-1.0, -1.0, -1.0, 0.0]
    """What a rank that found none sends in place of `numbers`."""

    response: int
    token: int
    name: str
    value: float

    def __str__(self) -> str:
        return f"response {self.response}, response token {self.token}: {self.name} is {self.value}"

    def numbers(self) -> list[float]:
        """Encode it as four numbers, which ranks can exchange."""
        return [float(self.response), float(self.token), float(FIELDS.index(self.name)), self.value]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "NonFinite":
        """Decode what `numbers` returned."""
        response, token, name, value = numbers
        return cls(int(response), int(token), FIELDS[int(name)], value)


def first_nonfinite(values: Mapping[str, Tensor], valid: Tensor, responses: Tensor) -> NonFinite | None:
    """Find the first value that is not finite, by response and token.

    Args:
        values: [B, T] tensors by name; if two are not finite at one token, the first name wins.
        valid: [B, T] bool, the tokens that count.
        responses: [B] int64, which of the step's responses each row is.

    Returns:
        The value and its place, or None.
    """
    values = {name: tensor.detach() for name, tensor in values.items()}
    wrong = valid & ~torch.stack([tensor.isfinite() for tensor in values.values()]).all(dim=0)
    rows = wrong.any(dim=-1).nonzero().flatten()
    if not len(rows):
        return None
    row = rows[responses[rows].argmin()]
    column = wrong[row].nonzero()[0, 0]
    held = {name: float(tensor[row, column]) for name, tensor in values.items()}
    name = next(name for name, value in held.items() if not math.isfinite(value))
    return NonFinite(int(responses[row]), int(valid[row, :column].sum()), name, held[name])


def cause_of(found: NonFinite | None) -> str:
    """Say in half a sentence why a step was skipped."""
    return str(found) if found else "every log-probability was finite, but the loss or its gradient was not"
