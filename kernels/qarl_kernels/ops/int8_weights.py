"""INT8 weights in one pass over memory: BF16 [E, N, K] -> int8 [E, N, K] and FP32 scales, and back.

    scale = amax / 127 of each row; w8 = round(w / scale), ties to even; scale 1 where all weights are zero
exactly as `int8.quantize_channel`, and bf16(w8 * scale). A whole row is kept in registers, which limits K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.int8 import INT8_MAX
from qarl_kernels.ops.exact_math import divide, round_half_even
from qarl_kernels.ops.fp8_kernels import LARGE, SMALL, count_nonfinite, load_whole_rows
from qarl_kernels.ops.fp8_weights import MAX_COLUMNS, VECTOR, dequantize_rows, empty_results, launch_row_quantizer
from qarl_kernels.ops.stacks import Weights, expert_weights

_INT8_MAX = tl.constexpr(INT8_MAX)


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
    weights, offsets, valid, amax_bits, row, valid_rows, start, first_row = load_whole_rows(
        table_ptr, num_rows, WORDS, TILE_ROWS, SPREAD, DEPTH, ALIGNMENT
    )
    scale = tl.math.div_rn(amax_bits.to(tl.float32, bitcast=True), _INT8_MAX)
    scale = tl.where(scale == 0.0, 1.0, scale)
    # Exact, and the reciprocal of a scale below 2^-64 cannot overflow.
    factor = tl.where(scale < SMALL, LARGE, 1.0)
    quotient = divide(weights * factor[None, :, None, None], (scale * factor)[None, :, None, None])
    tl.store(w8_ptr + start + offsets, round_half_even(quotient).to(tl.int8), mask=valid)
    tl.store(scale_ptr + first_row + row, scale, mask=valid_rows)
    count_nonfinite(amax_bits, valid_rows, nonfinite_ptr)


def int8_channel_quantize(weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each output row: scale = amax / 127, w8 = round(w / scale); an all-zero row gets scale 1.

    Args:
        weights: BF16 [N, K], [E, N, K] with any stride between experts, or E tensors [N, K]; each expert contiguous.

    Returns:
        w8: [E, N, K] int8; scale: [E, N, 1] FP32, both without E for one tensor [N, K]; nonfinite: [1] int32 on the
        device, the number of rows that hold NaN or Inf.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `int8.quantize_channel`.
    """
    tensors, stacked = expert_weights("int8_channel_quantize", weights, VECTOR, MAX_COLUMNS)
    with torch.no_grad():
        w8, scale, nonfinite = torch.ops.qarl.int8_channel_quantize(tensors)
    return (w8, scale, nonfinite) if stacked else (w8[0], scale[0], nonfinite)


@torch.library.custom_op("qarl::int8_channel_quantize", mutates_args=())
def _int8_channel_quantize(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return launch_row_quantizer(_int8_channel_quantize_kernel, weights, torch.int8)


@_int8_channel_quantize.register_fake
def _(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(weights, torch.int8)


def int8_channel_dequantize(w8: Tensor, scale: Tensor) -> Tensor:
    """Return bf16(w8 * scale) with one scale for each row.

    Args:
        w8: [..., N, K] int8, contiguous, K a multiple of 8.
        scale: [..., N, 1] FP32, contiguous.

    Returns:
        [..., N, K] BF16.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `weights.QuantizedWeight.dequantize`.
    """
    return dequantize_rows("int8_channel_dequantize", w8, scale, torch.int8)
