"""Sequences of a micro-batch laid end to end, so that nothing but attention sees that they are many."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Packing:
    """Where B sequences of together T tokens lie, end to end and, for kernels that take rectangles, as rows of S.

    Attributes:
        longest: S, the longest sequence's length.
        bounds: [B + 1] int32, where each sequence begins and the last one ends.
        places: [T] int64, each token's place in the rectangle [B * S], in which sequences begin at column 0.
    """

    longest: int
    bounds: Tensor
    places: Tensor

    @classmethod
    def of(cls, lengths: Tensor) -> "Packing":
        """Lay out sequences of these lengths [B]; waits for the device."""
        longest = int(lengths.max())
        real = torch.arange(longest, device=lengths.device) < lengths[:, None]
        bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(longest, bounds, real.flatten().nonzero().flatten())

    @property
    def positions(self) -> Tensor:
        """[T] int64, each token's position in its sequence."""
        return self.places % self.longest

    def pad(self, packed: Tensor) -> Tensor:
        """Lay out as a rectangle with zeros on the right: [T, ...] -> [B, S, ...], without a gradient."""
        num_rows, rest = len(self.bounds) - 1, packed.shape[1:]
        if len(packed) < num_rows * self.longest:
            packed = packed.new_zeros(num_rows * self.longest, *rest).index_copy_(0, self.places, packed)
        return packed.view(num_rows, self.longest, *rest)

    def pack(self, rectangle: Tensor) -> Tensor:
        """Drop what `pad` added: [B, S, ...] -> [T, ...], without a gradient."""
        return rectangle.flatten(0, 1)[self.places]


def split_by_tokens(rows: Tensor, lengths: Tensor, budget_tokens: int) -> list[Tensor]:
    """Split sequences into micro-batches of at most so many tokens, the longest ones together.

    Args:
        rows: [M] indices of sequences.
        lengths: [M] int64, their tokens.
        budget_tokens: most tokens of a micro-batch; a longer sequence has one to itself.

    Returns:
        Disjoint index tensors that cover `rows`.
    """
    order = lengths.argsort(descending=True, stable=True)
    sizes: list[int] = []
    total = budget_tokens
    for length in lengths[order].tolist():
        if total + length > budget_tokens:
            sizes.append(0)
            total = 0
        sizes[-1] += 1
        total += length
    return list(rows[order].split(sizes))
