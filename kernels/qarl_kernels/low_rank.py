"""Low-rank adapters beside frozen weights, in the order of vLLM's kernels: y = bf16(y_base + bf16(bf16(x A^T) B^T)).

t = x A^T and d = t B^T are each summed in FP32 and rounded once, and d is added to the rounded output of the base. In
an expert MLP the additions of gate and up come before SwiGLU; that of down is multiplied by the FP32 router weight
before it is rounded, and added to the weighted row, or to the row itself in formats that weight the sum.

B holds the scaling alpha / r already, rounded as vLLM rounds it.

Source: vLLM 0.25.1 lora/ops/triton_ops/kernel_utils.py, lora/layers/fused_moe.py.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

LowRank = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The factors A [E, r, K] and B [E, N, r] of an expert MLP's three projections, each expert's its own.

    Attributes:
        gate: A [E, r, H], B [E, I, r].
        up: likewise.
        down: A [E, r, I], B [E, H, r].
    """

    gate: LowRank
    up: LowRank
    down: LowRank

    def flat(self) -> tuple[Tensor, ...]:
        """Return A and B of gate, up and down."""
        return (*self.gate, *self.up, *self.down)

    @classmethod
    def of(cls, *factors: Tensor) -> "ExpertAdapters":
        """Make it of what `flat` returned."""
        return cls(factors[0:2], factors[2:4], factors[4:6])  # type: ignore[arg-type]


def low_rank(x: Tensor, factors: LowRank, offsets: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return d = (x A^T) B^T for rows sorted by expert, in torch and with gradients.

    Args:
        x: [M, K] BF16 or FP32.
        factors: A [E, r, K] and B [E, N, r].
        offsets: [E + 1] int32.
        out_dtype: None = x's; FP32 leaves d unrounded.

    Returns:
        [M, N] in out_dtype.
    """
    a, b = factors
    dtype = x.dtype if out_dtype is None else out_dtype
    rows = [x[start:stop] for start, stop in pairwise(offsets.tolist())]
    inner = [part @ one.mT for part, one in zip(rows, a, strict=True)]
    return torch.cat([part.to(dtype) @ one.mT.to(dtype) for part, one in zip(inner, b, strict=True)])


def low_rank_gate_up(x: Tensor, adapters: ExpertAdapters, offsets: Tensor) -> Tensor:
    """Return the adapters' addition to fc1's output: x [M, H] -> [M, 2 I], gate columns before up columns."""
    return torch.cat([low_rank(x, factors, offsets) for factors in (adapters.gate, adapters.up)], -1)
