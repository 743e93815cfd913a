"""Triton kernels of `ops/integer_weights.py`; BITS is how many of a word's bits a code takes, 4 or 8.

Weights are rounded to codes without a division each, and get the codes that a division would give. w and scale have 8
significant bits, so |w / scale| <= 128 either is n + 1/2 exactly or differs from it by more than 2^-10. t = w * (1 /
scale) + 3072 is rounded to multiples of 2^-12, far more than the product's error: ties stay ties and everything else
stays on its side, whether or not multiply and add are fused. Adding 1.5 * 2^23 rounds half to even and leaves the code
in the low bits. For the same reason amax / divisor may be amax * fl(1 / divisor): no quotient of a BF16 amax is close
enough to a point where its rounding to BF16 flips. Both are tested over all pairs of significands.

A thread holds the neighbouring weights of a packed word: of int4 eight, one 16-byte load. Experts are the grid's second
dimension.
"""

import triton
import triton.language as tl

from qarl_kernels.fp8 import MIN_TOKEN_SCALE
from qarl_kernels.integer import EMPTY_GROUP_SCALE
from qarl_kernels.ops.exact_math import reciprocal
from qarl_kernels.ops.split_reciprocal import divide_by_fp8_max, split_multiply, split_reciprocal

_EMPTY_SCALE = tl.constexpr(EMPTY_GROUP_SCALE)
_MIN_TOKEN_SCALE = tl.constexpr(MIN_TOKEN_SCALE)
_OVERFLOW_BITS = tl.constexpr(0x7F000000)  # the bits of integer.OVERFLOW; those of Inf and NaN are larger
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
# A float in [2048, 4096) is a multiple of 2^-12.
_SNAP = tl.constexpr(3072.0)
# 1.5 * 2^23: a whole number that is added to it stands in the float's low bits. Codes are kept like this, with their
# stored offset 2^(BITS-1).
_WHOLE = tl.constexpr(12582912.0)


def _pack_bias(bits: int) -> int:
    """What the upper bits of a word's floats add to it, modulo 2^32 and signed."""
    return (sum(0x4B400000 << lane for lane in range(0, 32, bits)) + 2**31) % 2**32 - 2**31


_PACK_BIAS_4 = tl.constexpr(_pack_bias(4))
_PACK_BIAS_8 = tl.constexpr(_pack_bias(8))
# 2^23, as bits and as a number.
_MANTISSA_BITS = tl.constexpr(0x4B000000)
_MANTISSA = tl.constexpr(8388608.0)


@triton.jit
def _abs_bits(values):
    # Compared as integers, NaN and Inf are the largest.
    return values.to(tl.int32, bitcast=True) & _ABS_BITS


@triton.jit
def _group_scale(amax_bits, INVERSE_DIVISOR: tl.constexpr):
    # The sign says whether a group overflows: a tensor of its own would go through shared memory beside the scale.
    inverse = tl.where(amax_bits < _OVERFLOW_BITS, INVERSE_DIVISOR, -INVERSE_DIVISOR)
    rounded = (amax_bits.to(tl.float32, bitcast=True) * inverse).to(tl.bfloat16).to(tl.float32)
    return tl.maximum(tl.abs(rounded), _EMPTY_SCALE), ~(rounded >= 0.0)


@triton.jit
def _round_to_codes(weights, inverse_scale, BITS: tl.constexpr, CODE_MAX: tl.constexpr):
    # |w / scale| rounds to code_max + 1 at most: only that code can leave a grid, and its negative occurs only on the
    # grids that have it.
    snapped = tl.minimum(tl.fma(weights, inverse_scale, _SNAP), _SNAP + CODE_MAX)
    return snapped + (_WHOLE - _SNAP + (1 << (BITS - 1)))


@triton.jit
def _code_values(codes, BITS: tl.constexpr):
    return codes - (_WHOLE + (1 << (BITS - 1)))


@triton.jit
def _pack_words(codes, lane, BITS: tl.constexpr, AXIS: tl.constexpr):
    words = tl.sum(codes.to(tl.int32, bitcast=True) << (BITS * lane), AXIS)
    return tl.sub(words, _PACK_BIAS_4 if BITS == 4 else _PACK_BIAS_8, sanitize_overflow=False)


@triton.jit
def _hide_order(words, count):
    # XOR with 0 hides from the compiler that the words are contiguous. Otherwise it would move them between threads
    # through shared memory to access four at once; like this each stays in the thread that has its weights.
    return words ^ (count >> 31)


@triton.jit
def _channel_scale(largest):
    return tl.maximum(divide_by_fp8_max(largest), _MIN_TOKEN_SCALE)


@triton.jit
def _encode_scale(scale, high, low):
    # Quotients are positive and at most 448 (1 + 2^-23): casts to FP8 saturate.
    coarse = split_multiply(scale, high, low).to(tl.float8e4nv).to(tl.float32)
    return (coarse * 0.125).to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _narrow(values, scale, CODE_MAX: tl.constexpr, SHIFT: tl.constexpr):
    """Codes and scale of a grid with SHIFT bits fewer: clamp(rn(code / 2^SHIFT)), scale * 2^SHIFT."""
    # Only the largest code can leave the grid.
    narrowed = tl.minimum(values * (0.5**SHIFT) + _WHOLE - _WHOLE, ((CODE_MAX + 1) >> SHIFT) - 1.0)
    return narrowed, scale * (1 << SHIFT)


@triton.jit
def _quantize_pack_kernel(
    table_ptr,  # [E] addresses of BF16 [N, K]
    packed_ptr,  # [E, N, K * BITS / 32]
    scale_ptr,  # [E, N, K / GROUP]
    dequantized_ptr,  # [E, N, K]
    nonfinite_ptr,  # [1]
    num_groups,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,  # bits that the grid of the dequantized weight has fewer
    INVERSE_DIVISOR: tl.constexpr,
    CODE_MAX: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    EMIT_BF16: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = GROUP // LANES
    SPREAD: tl.constexpr = min(WORDS, 8)
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    weights_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(tl.bfloat16))
    weights_ptr = tl.multiple_of(weights_ptr, ALIGNMENT)
    # If no dimension is contiguous, the compiler spreads the first one (SPREAD words of a group) over neighbouring
    # threads and keeps the last one (the rest of its words) in one thread.
    word = tl.arange(0, SPREAD)[:, None, None] + tl.arange(0, WORDS // SPREAD)[None, None, :] * SPREAD
    group = tl.arange(0, TILE)
    lane = tl.arange(0, LANES)[None, None, None, :]
    valid = group < num_groups - first
    start = first.to(tl.int64) * GROUP
    out = expert * num_groups
    words = group[None, :, None] * WORDS + word
    offsets = words[:, :, :, None] * LANES + lane

    weights = tl.load(weights_ptr + start + offsets, mask=valid[None, :, None, None], other=0.0).to(tl.float32)
    amax_bits = tl.max(tl.max(tl.max(_abs_bits(weights), 3), 2), 0)
    scale, bad = _group_scale(amax_bits, INVERSE_DIVISOR)
    codes = _round_to_codes(weights, (1.0 / scale)[None, :, None, None], BITS, CODE_MAX)
    packed_ptrs = packed_ptr + (out + first) * WORDS + _hide_order(words, num_groups)
    tl.store(packed_ptrs, _pack_words(codes, lane, BITS, 3), mask=valid[None, :, None])
    if EMIT_BF16:
        values, step = _code_values(codes, BITS), scale[None, :, None, None]
        if SHIFT > 0:
            values, step = _narrow(values, step, CODE_MAX, SHIFT)
        served = (values * step).to(tl.bfloat16)
        tl.store(dequantized_ptr + out * GROUP + start + offsets, served, mask=valid[None, :, None, None])
    tl.store(scale_ptr + out + first + group, scale.to(tl.bfloat16), mask=valid)
    tl.atomic_add(nonfinite_ptr + group * 0, 1, mask=valid & bad, sem="relaxed")


@triton.jit
def _quantize_encode_kernel(
    table_ptr,  # [E] addresses of BF16 [N, K]
    packed_ptr,  # [E, N, K / 8]
    scale_ptr,  # [E, N, K / 128]
    w8_ptr,  # [E, N, K]
    channel_scale_ptr,  # [E, N]
    nonfinite_ptr,  # [1]
    num_rows,
    GROUPS: tl.constexpr,  # of one row
    INVERSE_DIVISOR: tl.constexpr,
    CODE_MAX: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SPREAD: tl.constexpr,
    DEPTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE_ROWS
    weights_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(tl.bfloat16))
    weights_ptr = tl.multiple_of(weights_ptr, ALIGNMENT)
    # A row's groups: SPREAD side by side in the threads of one or more warps, DEPTH one after another in a thread.
    row = tl.arange(0, TILE_ROWS)
    group = tl.arange(0, SPREAD)[:, None, None] + tl.arange(0, DEPTH)[None, None, :] * SPREAD
    word = tl.arange(0, 16)[:, None, None, None]
    lane = tl.arange(0, 8)[None, None, None, None, :]
    valid_rows = row < num_rows - first
    valid = valid_rows[None, :, None] & (group < GROUPS)
    groups = row[None, :, None] * GROUPS + group
    words = groups[None, :, :, :] * 16 + word
    offsets = words[:, :, :, :, None] * 8 + lane
    start = first.to(tl.int64) * GROUPS
    out = expert * num_rows * GROUPS + start

    weights = tl.load(weights_ptr + start * 128 + offsets, mask=valid[None, :, :, :, None], other=0.0).to(tl.float32)
    scale, bad = _group_scale(tl.max(tl.max(_abs_bits(weights), 4), 0), INVERSE_DIVISOR)
    # Groups beyond K have the smallest scale and do not raise the row's largest.
    largest = tl.max(tl.max(scale, 2), 0)
    channel_scale = _channel_scale(largest)
    high, low = split_reciprocal(channel_scale)
    scale8 = _encode_scale(scale, high[None, :, None], low[None, :, None])
    # No scale is above 2^128 / divisor. In the other kernel the shorter way takes more registers.
    inverse = reciprocal(scale) if INVERSE_DIVISOR <= 0.25 else 1.0 / scale
    codes = _round_to_codes(weights, inverse[None, :, :, :, None], 4, CODE_MAX)
    packed_ptrs = packed_ptr + out * 16 + _hide_order(words, num_rows)
    tl.store(packed_ptrs, _pack_words(codes, lane, 4, 4), mask=valid[None, :, :, :])
    w8 = (_code_values(codes, 4) * scale8[None, :, :, :, None]).to(tl.float8e4nv)
    tl.store(w8_ptr + out * 128 + offsets, w8, mask=valid[None, :, :, :, None])
    tl.store(scale_ptr + out + groups, scale.to(tl.bfloat16), mask=valid)
    tl.store(channel_scale_ptr + expert * num_rows + first + row, channel_scale * 8.0, mask=valid_rows)
    tl.atomic_add(nonfinite_ptr + groups * 0, 1, mask=valid & bad, sem="relaxed")


@triton.jit
def _stored_codes(words, lane, BITS: tl.constexpr):
    # Placing the code in the low bits of the float 2^23 is cheaper than converting an integer.
    stored = ((words >> (BITS * lane)) & ((1 << BITS) - 1)) | _MANTISSA_BITS
    return stored.to(tl.float32, bitcast=True) - (_MANTISSA + (1 << (BITS - 1)))


@triton.jit
def _dequantize_kernel(
    packed_ptr,  # [M, GROUP * BITS / 32]
    scale_ptr,  # [M]
    weight_ptr,  # [M, GROUP]
    num_groups,  # M = E * N * K / GROUP
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = GROUP // LANES
    first = tl.program_id(0) * TILE
    word = tl.arange(0, WORDS)[:, None]
    group = tl.arange(0, TILE)
    lane = tl.arange(0, LANES)[None, None, :]
    valid = group < num_groups - first
    start = first.to(tl.int64)
    words = group[None, :] * WORDS + word
    packed = tl.load(packed_ptr + start * WORDS + _hide_order(words, num_groups), mask=valid[None, :])
    scale = tl.load(scale_ptr + start + group, mask=valid).to(tl.float32)
    values = (_stored_codes(packed[:, :, None], lane, BITS) * scale[None, :, None]).to(tl.bfloat16)
    tl.store(weight_ptr + start * GROUP + words[:, :, None] * LANES + lane, values, mask=valid[None, :, None])


@triton.jit
def _int4_encode_fp8_kernel(
    packed_ptr,  # [M, K / 8]
    scale_ptr,  # [M, K / 128]
    w8_ptr,  # [M, K]
    channel_scale_ptr,  # [M]
    num_rows,
    num_groups,
    ROW_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    every = tl.arange(0, ROW_GROUPS)
    word = tl.arange(0, 16)[:, None]
    lane = tl.arange(0, 8)[None, None, :]
    # The unrolled loop keeps the next row's loads in flight while one row is computed.
    for step in tl.static_range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        exists = row < num_rows
        scales = tl.load(scale_ptr + row * num_groups + every, mask=(every < num_groups) & exists, other=0.0)
        channel_scale = _channel_scale(tl.max(scales.to(tl.float32), 0))
        tl.store(channel_scale_ptr + row, channel_scale * 8.0, mask=exists)
        high, low = split_reciprocal(channel_scale)
        for first in range(0, num_groups, TILE):
            group = first + tl.arange(0, TILE)
            valid = (group < num_groups) & exists
            words = group[None, :] * 16 + word
            packed = tl.load(packed_ptr + row * num_groups * 16 + _hide_order(words, num_groups), mask=valid[None, :])
            scale = tl.load(scale_ptr + row * num_groups + group, mask=valid, other=0.0).to(tl.float32)
            scale8 = _encode_scale(scale, high, low)
            w8 = (_stored_codes(packed[:, :, None], lane, 4) * scale8[None, :, None]).to(tl.float8e4nv)
            tl.store(w8_ptr + row * num_groups * 128 + words[:, :, None] * 8 + lane, w8, mask=valid[None, :, None])
