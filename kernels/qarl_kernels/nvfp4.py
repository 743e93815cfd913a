"""NVFP4 weights: E2M1 codes, an E4M3 scale for each group of 16 along K, one FP32 scale for a whole weight.

    G = 448 * 6 / amax(W)      s = max(e4m3(G * amax(group) / 6), 2^-6)      code = e2m1(w / (s / G))

and w ~ code * s / G. G is stored as this divisor. Codes, scales and G are compressed-tensors', except that it lets
scales fall below 2^-6, which vLLM's Marlin kernel would read as 0, and stores 0.125 in the place of 0.
Source: compressed-tensors 0.17.0 `generate_gparam`, `calculate_qparams`, `FP4_E2M1_DATA.cast_to_fp4`.
"""

import torch
from torch import Tensor

from qarl_kernels.division import divide
from qarl_kernels.fp8 import FP8_MAX, cast_fp8

GROUP = 16
FP4_MAX = 6.0
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Marlin's own scales have no sign and a larger exponent; it reads what is below this as 0.
LEAST_SCALE = 2.0**-6
# From 2^20.4 on Marlin's form of 1 / G, which it multiplies by 2^119, is infinite.
OVERFLOW = 2.0**20
# Rounding to the grid, halves to the code whose last bit is 0: codes rise above the first and at the second.
_RISE_ABOVE = (0.25, 1.25, 2.5, 5.0)
_RISE_AT = (0.75, 1.75, 3.5)


def global_divisor(amax: Tensor) -> Tensor:
    """Return G = 448 * 6 / amax, or 1 where amax is so small that G would be infinite.

    Args:
        amax: the largest magnitude of all weights that share G, FP32, any shape.

    Returns:
        The same shape, FP32.
    """
    divisor = amax.clamp(min=torch.finfo(torch.float32).tiny).reciprocal() * (FP8_MAX * FP4_MAX)
    return torch.nan_to_num(divisor, nan=1.0, posinf=1.0)


def tensor_scale(divisor: Tensor) -> Tensor:
    """Return the factor of a whole weight that engines multiply by, 1 / G.

    Args:
        divisor: [..., 1] FP32, G.

    Returns:
        [..., 1, 1] FP32.
    """
    return divisor.reciprocal().unsqueeze(-1)


def quantize(weight: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize groups of 16 along K.

    Args:
        weight: [..., N, K] float, K a multiple of 16.
        divisor: [..., 1] FP32, G of each weight [N, K].

    Returns:
        codes: [..., N, K] uint8, sign << 3 | index in `GRID`; scale: [..., N, K / 16] float8_e4m3fn.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    divisor = divisor.unsqueeze(-1)
    scale = cast_fp8(divisor * divide(groups.abs().amax(-1), FP4_MAX)).float().clamp(min=LEAST_SCALE)
    size = groups.abs() / (scale / divisor).unsqueeze(-1)
    index = sum((size > bound).to(torch.uint8) for bound in _RISE_ABOVE)
    index = index + sum((size >= bound).to(torch.uint8) for bound in _RISE_AT)
    codes = index | ((groups < 0).to(torch.uint8) << 3)
    return codes.flatten(-2), scale.to(torch.float8_e4m3fn)


def pack(codes: Tensor) -> Tensor:
    """Pack two codes a byte, the one of the even column in the low bits.

    Args:
        codes: [..., N, K] uint8.

    Returns:
        [..., N, K / 2] uint8.
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Invert `pack`.

    Args:
        packed: [..., N, K / 2] uint8.

    Returns:
        [..., N, K] uint8.
    """
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def unscaled(packed: Tensor, scale: Tensor) -> Tensor:
    """Return code * s, which BF16 holds exactly and Marlin multiplies activations by; 1 / G is left to the sum.

    Args:
        packed: [..., N, K / 2] uint8.
        scale: [..., N, K / 16] float8_e4m3fn.

    Returns:
        [..., N, K] BF16.
    """
    grid = torch.tensor([*GRID, *(-value for value in GRID)], dtype=torch.bfloat16, device=packed.device)
    groups = grid[unpack(packed).int()].unflatten(-1, (-1, GROUP))
    return (groups * scale.to(torch.bfloat16).unsqueeze(-1)).flatten(-2)
