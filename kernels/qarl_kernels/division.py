"""Division by a constant that rounds the same on every device."""

import torch
from torch import Tensor


def divide(values: Tensor, divisor: float) -> Tensor:
    """Return values / divisor, correctly rounded.

    torch on CUDA multiplies by the reciprocal of a Python number, which is off by one unit in the last place where the
    engine's kernels divide; a divisor on the device is divided by.

    Args:
        values: any shape, float.
        divisor: the constant.

    Returns:
        The same shape and dtype.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
