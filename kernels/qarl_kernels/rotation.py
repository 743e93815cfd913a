"""Rotation of pairs as the rollout engine rounds it: both products and their sum in FP32, rounded once."""

import torch
from torch import Tensor


def rotate_pairs_reference(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Rotate pairs (x_i, x_{i + D/2}); see `dispatch_norms.rotate_pairs`."""
    first, second = (half.float() for half in x.chunk(2, dim=-1))
    (cos_first, cos_second), (sin_first, sin_second) = (
        [half.float().unsqueeze(-2) for half in table.chunk(2, dim=-1)] for table in (cos, sin)
    )
    if back:
        sin_first, sin_second = -sin_second, -sin_first
    halves = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    return torch.cat([half.to(x.dtype) for half in halves], dim=-1)
