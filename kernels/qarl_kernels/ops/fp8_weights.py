"""FP8 weights in one pass over memory: BF16 [E, N, K] -> float8_e4m3fn [E, N, K] and FP32 scales.

    scale = amax / 448 of each row, or of each 128x128 block; w8 = fp8(w / scale); scale 1 where all weights are zero
exactly as `fp8.quantize_channel` and `fp8.quantize_block`, and back: bf16(w8 * scale). For one scale per row a whole
row is kept in registers, which limits K; blocks have no limit.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from qarl_formats import FP8_BLOCK
from qarl_kernels.ops.fp8_kernels import (
    _dequantize_kernel,
    _fp8_block_quantize_kernel,
    _fp8_channel_quantize_kernel,
)
from qarl_kernels.ops.stacks import Weights, address_table, device_problems, expert_weights, row_tile, stack_shape

MAX_COLUMNS = 16384
VECTOR = 8
_BLOCK_WARPS = 8
_DEQUANTIZE_ROWS = 32


def fp8_channel_quantize(weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each output row: scale = amax / 448, w8 = fp8(w / scale); an all-zero row gets scale 1.

    Args:
        weights: BF16 [N, K], [E, N, K] with any stride between experts, or E tensors [N, K]; each expert contiguous.

    Returns:
        w8: [E, N, K] float8_e4m3fn; scale: [E, N, 1] FP32, both without E for one tensor [N, K]; nonfinite: [1] int32
        on the device, the number of rows that hold NaN or Inf.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `fp8.quantize_channel`.
    """
    tensors, stacked = expert_weights("fp8_channel_quantize", weights, VECTOR, MAX_COLUMNS)
    with torch.no_grad():
        w8, scale, nonfinite = torch.ops.qarl.fp8_channel_quantize(tensors)
    return (w8, scale, nonfinite) if stacked else (w8[0], scale[0], nonfinite)


@torch.library.custom_op("qarl::fp8_channel_quantize", mutates_args=())
def _fp8_channel_quantize(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return launch_row_quantizer(_fp8_channel_quantize_kernel, weights, torch.float8_e4m3fn)


@_fp8_channel_quantize.register_fake
def _(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(weights, torch.float8_e4m3fn)


def launch_row_quantizer(kernel: Any, weights: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Run a kernel that finds one scale for each output row.

    Args:
        kernel: a kernel that starts with `load_whole_rows`.
        weights: what `expert_weights` returned.
        dtype: that of the 8-bit weights.

    Returns:
        As `empty_results`, filled.
    """
    results = empty_results(weights, dtype)
    experts, rows, columns = stack_shape(weights)
    words = columns // VECTOR
    tile_rows, spread, depth, num_warps = row_tile(words, width=1)
    with torch.cuda.device_of(weights[0]):
        table, alignment = address_table(weights)
        kernel[triton.cdiv(rows, tile_rows), experts](
            table, *results, rows, WORDS=words, TILE_ROWS=tile_rows, SPREAD=spread, DEPTH=depth, ALIGNMENT=alignment,
            num_warps=num_warps,
        )  # fmt: skip
    return results


def fp8_block_quantize(weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize 128x128 blocks: scale = amax / 448, w8 = fp8(w / scale); edge blocks may be partial, zeros get scale 1.

    Args:
        weights: BF16 [N, K], [E, N, K] with any stride between experts, or E tensors [N, K]; each expert contiguous.

    Returns:
        w8: [E, N, K] float8_e4m3fn; scale: [E, ceil(N/128), ceil(K/128)] FP32, both without E for one tensor [N, K];
        nonfinite: [1] int32 on the device, the number of blocks that hold NaN or Inf.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `fp8.quantize_block`.
    """
    tensors, stacked = expert_weights("fp8_block_quantize", weights, VECTOR)
    with torch.no_grad():
        w8, scale, nonfinite = torch.ops.qarl.fp8_block_quantize(tensors)
    return (w8, scale, nonfinite) if stacked else (w8[0], scale[0], nonfinite)


@torch.library.custom_op("qarl::fp8_block_quantize", mutates_args=())
def _fp8_block_quantize(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    results = empty_results(weights, torch.float8_e4m3fn, block=True)
    experts, rows, columns = stack_shape(weights)
    with torch.cuda.device_of(weights[0]):
        table, alignment = address_table(weights)
        _fp8_block_quantize_kernel[results[1][0].numel(), experts](
            table, *results, rows, columns // VECTOR, ALIGNMENT=alignment, num_warps=_BLOCK_WARPS
        )
    return results


@_fp8_block_quantize.register_fake
def _(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(weights, torch.float8_e4m3fn, block=True)


def empty_results(tensors: list[Tensor], dtype: torch.dtype, *, block: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for 8-bit weights, their scales and the count of rows or blocks that are not finite.

    Args:
        tensors: what `expert_weights` returned.
        dtype: that of the 8-bit weights.
        block: one scale for each 128x128 block, and not for each row.

    Returns:
        w8: [E, N, K]; scale: FP32; nonfinite: [1] int32, zero.
    """
    experts, rows, columns = stack_shape(tensors)
    device = tensors[0].device
    scales = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)) if block else (rows, 1)
    return (
        torch.empty(experts, rows, columns, dtype=dtype, device=device),
        torch.empty(experts, *scales, dtype=torch.float32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


def fp8_channel_dequantize(w8: Tensor, scale: Tensor) -> Tensor:
    """Return bf16(w8 * scale) with one scale for each row.

    Args:
        w8: [..., N, K] float8_e4m3fn, contiguous, K a multiple of 8.
        scale: [..., N, 1] FP32, contiguous.

    Returns:
        [..., N, K] BF16.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `weights.QuantizedWeight.dequantize`.
    """
    return dequantize_rows("fp8_channel_dequantize", w8, scale, torch.float8_e4m3fn)


def dequantize_rows(op: str, w8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bf16(w8 * scale) with one scale for each row.

    Args:
        op: the operator's name in messages.
        w8: [..., N, K], contiguous, K a multiple of 8; FP8, int8, or BF16 that other scales were multiplied into.
        scale: [..., N, 1] FP32, contiguous.
        dtype: the legal dtype of w8.

    Returns:
        [..., N, K] BF16.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.
    """
    _check_stored(op, w8, scale, (*w8.shape[:-1], 1), dtype)
    with torch.no_grad():
        return torch.ops.qarl.dequantize_weight(w8, scale, False)


def fp8_block_dequantize(w8: Tensor, scale: Tensor) -> Tensor:
    """Return bf16(w8 * scale) with one scale for each 128x128 block.

    Args:
        w8: [..., N, K] float8_e4m3fn, contiguous, K a multiple of 8.
        scale: [..., ceil(N/128), ceil(K/128)] FP32, contiguous.

    Returns:
        [..., N, K] BF16.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `weights.QuantizedWeight.dequantize`.
    """
    blocks = tuple(-(-size // FP8_BLOCK) for size in w8.shape[-2:])
    _check_stored("fp8_block_dequantize", w8, scale, (*w8.shape[:-2], *blocks), torch.float8_e4m3fn)
    with torch.no_grad():
        return torch.ops.qarl.dequantize_weight(w8, scale, True)


@torch.library.custom_op("qarl::dequantize_weight", mutates_args=())
def _dequantize_weight(w8: Tensor, scale: Tensor, block: bool) -> Tensor:
    weight = torch.empty_like(w8, dtype=torch.bfloat16)
    rows, columns = w8.shape[-2:]
    grid = triton.cdiv(rows, _DEQUANTIZE_ROWS) * triton.cdiv(columns, FP8_BLOCK), w8.numel() // (rows * columns)
    with torch.cuda.device_of(w8):
        _dequantize_kernel[grid](
            w8, scale, weight, rows, columns // VECTOR, SCALE_ROWS=FP8_BLOCK if block else 1, COLUMN_SCALES=block,
            TILE_ROWS=_DEQUANTIZE_ROWS,
        )  # fmt: skip
    return weight


@_dequantize_weight.register_fake
def _(w8: Tensor, scale: Tensor, block: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(w8, dtype=torch.bfloat16)


def _check_stored(op: str, w8: Tensor, scale: Tensor, scale_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    problems = device_problems([w8, scale])
    if (w8.dtype, scale.dtype) != (dtype, torch.float32):
        problems.append(f"w8 is {w8.dtype} and scale {scale.dtype} (legal: {dtype}, torch.float32)")
    if w8.ndim < 2 or w8.numel() == 0 or w8.shape[-1] % VECTOR:
        problems.append(f"w8 is {list(w8.shape)} (legal: [..., N, K], not empty, K a multiple of {VECTOR})")
    if tuple(scale.shape) != scale_shape:
        problems.append(f"scale is {list(scale.shape)} (legal: {list(scale_shape)})")
    if not (w8.is_contiguous() and scale.is_contiguous()):
        problems.append(f"strides {w8.stride()} and {scale.stride()} (legal: w8 and scale contiguous)")
    if problems:
        raise ValueError(f"{op}: " + "; ".join(problems))
