"""The formats that are tested, and weights in which a swapped or shifted scale shows."""

import torch
from torch import Tensor

from qarl_kernels import get_format

FORMATS = {
    "w4a16": get_format("w4a16"),
    "w4a16_g32_narrow": get_format("w4a16", group_size=32, scale_convention="narrow_range"),
    "w3a16_g64": get_format("w3a16", group_size=64),
    "w4a8": get_format("w4a8"),
    "fp8_block": get_format("fp8_block"),
    "fp8_channel": get_format("fp8_channel"),
    "bf16": get_format("bf16"),
}


def uneven_weight(*shape: int) -> Tensor:
    """BF16 Gaussian weights [..., N, K] whose size differs by powers of two between rows and between 32-wide groups."""
    *batch, rows, columns = shape
    row_size = torch.exp2(torch.randint(-2, 3, (*batch, rows, 1)).float())
    group_size = torch.exp2(torch.randint(-2, 3, (*batch, rows, columns // 32)).float())
    weight = torch.randn(shape) * row_size * group_size.repeat_interleave(32, -1) * columns**-0.5
    return weight.to(torch.bfloat16)
