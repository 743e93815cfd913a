"""Rows of several experts, each behind the other's: where they begin, and their products."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from support.triton_interpreter import DEVICE


def offsets_of(counts: Sequence[int]) -> Tensor:
    """Where each expert's rows begin, and where the last one's end, for the kernels."""
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)


def product_by_expert(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of `x` [M, K] times their expert's weight [E, N, K], in float64."""
    bounds = pairwise(offsets.tolist())
    return torch.cat([x[start:stop].double() @ w.double().T for (start, stop), w in zip(bounds, weight, strict=True)])
