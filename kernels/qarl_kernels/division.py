"""Scales from magnitudes, rounded the same on every device."""

import torch
from torch import Tensor


def divide(values: Tensor, divisor: float) -> Tensor:
    """Return values / divisor, correctly rounded.

    Given a Python number, torch on CUDA multiplies by its reciprocal, which can be off by one unit in the last place
    from the division in the engine's kernels. Given a tensor on the device, it divides.

    Args:
        values: any shape, float.
        divisor: the constant.

    Returns:
        The same shape and dtype.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def nonzero_scale(scale: Tensor) -> Tensor:
    """Return scales with 1 in the place of 0, so that a row of zeros can be divided by its own.

    Args:
        scale: any shape, float.

    Returns:
        The same shape and dtype.
    """
    return torch.where(scale == 0, torch.ones_like(scale), scale)
