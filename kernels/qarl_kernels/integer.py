"""Symmetric group-wise integer quantization for 2 to 8 bits: `w ~ code * scale`, one BF16 scale per group along K.

The scale is rounded to BF16 before codes are computed, so that codes are the nearest points of the grid that is stored.
Packing is `pack-quantized` as vLLM reads it: a row's codes one after another in int32 words, lowest bits first, each
stored with the offset 2^(num_bits-1). A code of 3, 5, 6 or 7 bits may lie in two words.
"""

import math

import torch
from torch import Tensor

from qarl_formats import ScaleConvention
from qarl_kernels.division import divide

# The scale of an all-zero group, and the smallest there is: so small that such a group never determines w4a8's channel
# scale, the largest of a row's group scales; but a normal number, so that kernels may multiply by its reciprocal.
EMPTY_GROUP_SCALE = torch.finfo(torch.bfloat16).tiny
# From this magnitude on, code * scale may overflow BF16, whose largest number is just below 2^128.
OVERFLOW = 2.0**127


def integer_grid(num_bits: int, scale_convention: ScaleConvention) -> tuple[int, int, float]:
    """Return the smallest code, the largest code and the divisor of the group maximum.

    Args:
        num_bits: 2 to 8.
        scale_convention: `narrow_range`, `full_range` or `clipped_range`.

    Returns:
        code_min, code_max and divisor, with scale = amax / divisor.
    """
    code_max = 2 ** (num_bits - 1) - 1
    if scale_convention == "narrow_range":
        return -code_max, code_max, float(code_max)
    divisor = (2**num_bits - 1) / 2 if scale_convention == "full_range" else 2.0 ** (num_bits - 1)
    return -code_max - 1, code_max, divisor


def quantize_integer(
    weight: Tensor, num_bits: int, group_size: int, scale_convention: ScaleConvention
) -> tuple[Tensor, Tensor]:
    """Quantize along K: scale = max(bf16(amax / divisor), 2^-126), code = clamp(round(w / scale)); zeros stay zeros.

    Args:
        weight: [..., N, K] float, K a multiple of group_size.
        num_bits: 2 to 8.
        group_size: elements per scale along K.
        scale_convention: the grid.

    Returns:
        codes: [..., N, K] int8; scale: [..., N, K / group_size] BF16.

    Source: vLLM 0.25.1 `compressed_tensors` W4A16 contract; arXiv 2604.07853 section 2.2 with z = 0.
    """
    code_min, code_max, divisor = integer_grid(num_bits, scale_convention)
    groups = weight.float().unflatten(-1, (-1, group_size))
    scale = divide(groups.abs().amax(-1), divisor).to(torch.bfloat16).clamp(min=EMPTY_GROUP_SCALE)
    codes = torch.round(groups / scale.float().unsqueeze(-1)).clamp_(code_min, code_max)
    return codes.to(torch.int8).flatten(-2), scale


def dequantize_integer(codes: Tensor, scale: Tensor) -> Tensor:
    """Return bf16(bf16(code) * scale), the product every W4A16 kernel of vLLM feeds its BF16 GEMM.

    Args:
        codes: [..., N, K] int8.
        scale: [..., N, G] BF16, G dividing K.

    Returns:
        weight: [..., N, K] BF16.
    """
    groups = codes.to(torch.bfloat16).unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.unsqueeze(-1)).flatten(-2)


def pack_int32(codes: Tensor, num_bits: int) -> Tensor:
    """Pack codes along K one after another, lowest bits first, each with the offset 2^(num_bits-1); the tail is zeros.

    Args:
        codes: [..., N, K] int8.
        num_bits: 2 to 8.

    Returns:
        packed: [..., N, ceil(K * num_bits / 32)] int32.
    """
    num_codes, num_words = _period(num_bits)
    num_columns = codes.shape[-1]
    unsigned = codes.to(torch.int32) + 2 ** (num_bits - 1)
    unsigned = torch.nn.functional.pad(unsigned, (0, -num_columns % num_codes)).unflatten(-1, (-1, num_codes))
    packed = unsigned.new_zeros(*unsigned.shape[:-1], num_words)
    for place in range(num_codes):
        word, shift = divmod(num_bits * place, 32)
        packed[..., word] |= unsigned[..., place] << shift
        if shift + num_bits > 32:
            packed[..., word + 1] |= unsigned[..., place] >> (32 - shift)
    return packed.flatten(-2)[..., : -(-num_columns * num_bits // 32)].contiguous()


def unpack_int32(packed: Tensor, num_bits: int, num_columns: int) -> Tensor:
    """Invert `pack_int32`.

    Args:
        packed: [..., N, W] int32.
        num_bits: 2 to 8.
        num_columns: K, the number of codes in a row.

    Returns:
        codes: [..., N, K] int8.
    """
    num_codes, num_words = _period(num_bits)
    words = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % num_words)).unflatten(-1, (-1, num_words))
    mask, lanes = 2**num_bits - 1, []
    for place in range(num_codes):
        word, shift = divmod(num_bits * place, 32)
        lane = words[..., word] >> shift
        if shift + num_bits > 32:
            # The sign fills the upper bits of a shifted word; those that belong to the next one are its.
            lane = (lane & (2 ** (32 - shift) - 1)) | (words[..., word + 1] << (32 - shift))
        lanes.append(lane & mask)
    return (torch.stack(lanes, dim=-1).flatten(-2)[..., :num_columns] - 2 ** (num_bits - 1)).to(torch.int8)


def _period(num_bits: int) -> tuple[int, int]:
    # After so many codes, in so many words, a code begins at the start of a word again.
    shared = math.gcd(num_bits, 32)
    return 32 // shared, num_bits // shared
