"""Triton kernels of `ops/eight_bit_weights.py`.

A row or a 128x128 block stays in registers between finding its largest magnitude and writing 8-bit numbers: one pass
over memory. Of FP8 quotients come from `split_reciprocal`, which leaves the same values as a correctly rounded
division. If a scale is below 2^-64, weights and scale are first multiplied by 2^64 (exactly), because 1 / scale could
overflow.

A thread holds 8 neighbouring weights. Experts are the grid's second dimension.
"""

import triton
import triton.language as tl

from qarl_kernels.fp8 import FP8_MAX
from qarl_kernels.int8 import INT8_MAX
from qarl_kernels.ops.exact_math import divide, round_half_even
from qarl_kernels.ops.split_reciprocal import split_multiply, split_reciprocal

_FP8_MAX = tl.constexpr(FP8_MAX)
_INT8_MAX = tl.constexpr(INT8_MAX)
_INF_BITS = tl.constexpr(0x7F800000)
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
_SMALL = tl.constexpr(2.0**-64)
_LARGE = tl.constexpr(2.0**64)


@triton.jit
def _abs_bits(weights):
    # Compared as integers, NaN and Inf are the largest.
    return weights.to(tl.int32, bitcast=True) & _ABS_BITS


@triton.jit
def _load_whole_rows(
    table_ptr,
    num_rows,
    WORDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SPREAD: tl.constexpr,
    DEPTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Read a program's rows: FP32 weights, bits of each row's largest magnitude, where weights and rows are stored.

    Returns weights and their offsets [SPREAD, TILE_ROWS, DEPTH, 8], which of them exist, the magnitudes' bits, rows and
    which of them exist [TILE_ROWS], the first weight's and the first row's place in the whole stack.
    """
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE_ROWS
    weights_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(tl.bfloat16))
    weights_ptr = tl.multiple_of(weights_ptr, ALIGNMENT)
    # A row's words: SPREAD side by side in the threads of one or more warps, DEPTH one after another in a thread.
    word = tl.arange(0, SPREAD)[:, None, None] + tl.arange(0, DEPTH)[None, None, :] * SPREAD
    row = tl.arange(0, TILE_ROWS)
    valid_rows = row < num_rows - first
    valid = (valid_rows[None, :, None] & (word < WORDS))[:, :, :, None]
    offsets = (row[None, :, None] * WORDS + word)[:, :, :, None] * 8 + tl.arange(0, 8)[None, None, None, :]
    start = first.to(tl.int64) * WORDS * 8
    weights = tl.load(weights_ptr + start + offsets, mask=valid, other=0.0).to(tl.float32)
    amax_bits = tl.max(tl.max(tl.max(_abs_bits(weights), 3), 2), 0)
    first_row = expert * num_rows + first
    return weights, offsets, valid, amax_bits, row, valid_rows, first_row * WORDS * 8, first_row


@triton.jit
def _count_nonfinite(amax_bits, valid_rows, nonfinite_ptr):
    """Add the number of a program's rows that hold NaN or Inf."""
    bad = valid_rows & (amax_bits >= _INF_BITS)
    tl.atomic_add(nonfinite_ptr + amax_bits * 0, 1, mask=bad, sem="relaxed")


@triton.jit
def _scale_and_inverse(amax_bits):
    scale = tl.math.div_rn(amax_bits.to(tl.float32, bitcast=True), _FP8_MAX)
    scale = tl.where(scale == 0.0, 1.0, scale)
    factor = tl.where(scale < _SMALL, _LARGE, 1.0)
    high, low = split_reciprocal(scale * factor)
    return scale, factor, high, low


@triton.jit
def _fp8_channel_quantize_kernel(
    table_ptr,  # [E] addresses of BF16 [N, K]
    w8_ptr,  # [E, N, K]
    scale_ptr,  # [E, N]
    nonfinite_ptr,  # [1]
    num_rows,
    WORDS: tl.constexpr,  # K / 8
    TILE_ROWS: tl.constexpr,
    SPREAD: tl.constexpr,
    DEPTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    weights, offsets, valid, amax_bits, row, valid_rows, start, first_row = _load_whole_rows(
        table_ptr, num_rows, WORDS, TILE_ROWS, SPREAD, DEPTH, ALIGNMENT
    )
    scale, factor, high, low = _scale_and_inverse(amax_bits)
    weights *= factor[None, :, None, None]
    w8 = split_multiply(weights, high[None, :, None, None], low[None, :, None, None]).to(tl.float8e4nv)
    tl.store(w8_ptr + start + offsets, w8, mask=valid)
    tl.store(scale_ptr + first_row + row, scale, mask=valid_rows)
    _count_nonfinite(amax_bits, valid_rows, nonfinite_ptr)


@triton.jit
def _int8_channel_quantize_kernel(
    table_ptr,  # [E] addresses of BF16 [N, K]
    w8_ptr,  # [E, N, K]
    scale_ptr,  # [E, N]
    nonfinite_ptr,  # [1]
    num_rows,
    WORDS: tl.constexpr,  # K / 8
    TILE_ROWS: tl.constexpr,
    SPREAD: tl.constexpr,
    DEPTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    weights, offsets, valid, amax_bits, row, valid_rows, start, first_row = _load_whole_rows(
        table_ptr, num_rows, WORDS, TILE_ROWS, SPREAD, DEPTH, ALIGNMENT
    )
    scale = tl.math.div_rn(amax_bits.to(tl.float32, bitcast=True), _INT8_MAX)
    scale = tl.where(scale == 0.0, 1.0, scale)
    # Exact, and the reciprocal of a scale below 2^-64 cannot overflow.
    factor = tl.where(scale < _SMALL, _LARGE, 1.0)
    quotient = divide(weights * factor[None, :, None, None], (scale * factor)[None, :, None, None])
    tl.store(w8_ptr + start + offsets, round_half_even(quotient).to(tl.int8), mask=valid)
    tl.store(scale_ptr + first_row + row, scale, mask=valid_rows)
    _count_nonfinite(amax_bits, valid_rows, nonfinite_ptr)


@triton.jit
def _fp8_block_quantize_kernel(
    table_ptr,  # [E] addresses of BF16 [N, K]
    w8_ptr,  # [E, N, K]
    scale_ptr,  # [E, ceil(N / 128), ceil(K / 128)]
    nonfinite_ptr,  # [1]
    num_rows,
    num_words,  # K / 8
    ALIGNMENT: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    column_blocks = tl.cdiv(num_words, 16)
    first_row = (tl.program_id(0) // column_blocks) * 128
    first_word = (tl.program_id(0) % column_blocks) * 16
    weights_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(tl.bfloat16))
    weights_ptr = tl.multiple_of(weights_ptr, ALIGNMENT)
    word = tl.arange(0, 16)[:, None]
    row = tl.arange(0, 128)[None, :]
    valid = ((row < num_rows - first_row) & (word < num_words - first_word))[:, :, None]
    offsets = (row * num_words + word)[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    start = (first_row.to(tl.int64) * num_words + first_word) * 8

    weights = tl.load(weights_ptr + start + offsets, mask=valid, other=0.0).to(tl.float32)
    amax_bits = tl.max(tl.max(tl.max(_abs_bits(weights), 2), 1), 0)
    scale, factor, high, low = _scale_and_inverse(amax_bits)
    w8 = split_multiply(weights * factor, high, low).to(tl.float8e4nv)
    tl.store(w8_ptr + expert * num_rows * num_words * 8 + start + offsets, w8, mask=valid)
    tl.store(scale_ptr + expert * tl.num_programs(0) + tl.program_id(0), scale)
    tl.atomic_add(nonfinite_ptr, 1, mask=amax_bits >= _INF_BITS, sem="relaxed")


@triton.jit
def _dequantize_kernel(
    w8_ptr,  # [E, N, K]
    scale_ptr,  # [E, ceil(N / SCALE_ROWS), 1 or ceil(K / 128)]
    weight_ptr,  # [E, N, K] BF16
    num_rows,
    num_words,  # K / 8
    SCALE_ROWS: tl.constexpr,  # rows for each scale: 1 or 128
    COLUMN_SCALES: tl.constexpr,  # one scale for 128 columns, or for all
    TILE_ROWS: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    column_blocks = tl.cdiv(num_words, 16)
    block = tl.program_id(0) % column_blocks
    first_row = (tl.program_id(0) // column_blocks) * TILE_ROWS
    word = tl.arange(0, 16)[:, None]
    row = tl.arange(0, TILE_ROWS)
    valid_rows = row < num_rows - first_row
    valid = (valid_rows[None, :] & (word < num_words - block * 16))[:, :, None]
    offsets = (row[None, :] * num_words + word)[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    start = ((expert * num_rows + first_row) * num_words + block * 16) * 8

    scale_rows = expert * tl.cdiv(num_rows, SCALE_ROWS) + (first_row + row) // SCALE_ROWS
    scales = scale_rows * column_blocks + block if COLUMN_SCALES else scale_rows
    scale = tl.load(scale_ptr + scales, mask=valid_rows, other=0.0)
    values = tl.load(w8_ptr + start + offsets, mask=valid).to(tl.float32)
    tl.store(weight_ptr + start + offsets, (values * scale[None, :, None]).to(tl.bfloat16), mask=valid)
