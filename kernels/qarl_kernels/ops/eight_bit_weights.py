"""Weights of 8 bits in one pass over memory: BF16 [E, N, K] -> FP8 or INT8 [E, N, K] and FP32 scales, and back.

    fp8_rows     scale = amax / 448 of each row              w8 = fp8(w / scale)
    fp8_blocks   scale = amax / 448 of each 128x128 block    w8 = fp8(w / scale)
    int8_rows    scale = amax / 127 of each row              w8 = round(w / scale), ties to even
scale 1 where all weights are zero, exactly as `fp8.quantize_channel`, `fp8.quantize_block` and `int8.quantize_channel`,
and back: bf16(w8 * scale). Of one scale per row a whole row is kept in registers, which limits K; blocks have none.
"""

import torch
import triton
from torch import Tensor

from qarl_formats import FP8_BLOCK
from qarl_kernels.ops.checks import refuse
from qarl_kernels.ops.eight_bit_kernels import (
    _dequantize_kernel,
    _fp8_block_quantize_kernel,
    _fp8_channel_quantize_kernel,
    _int8_channel_quantize_kernel,
)
from qarl_kernels.ops.stacks import address_table, device_problems, expert_weights, row_tile, stack_shape
from qarl_kernels.weights import Weights

MAX_COLUMNS = 32768
VECTOR = 8
DTYPES = {"fp8_rows": torch.float8_e4m3fn, "fp8_blocks": torch.float8_e4m3fn, "int8_rows": torch.int8}
"""What is stored, by the kind of weights."""
_ROW_KERNELS = {"fp8_rows": _fp8_channel_quantize_kernel, "int8_rows": _int8_channel_quantize_kernel}
# NVFP4's numbers are BF16 once their groups' scales are multiplied into them.
_SCALED_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.bfloat16)
_BLOCK_WARPS = 8
_DEQUANTIZE_ROWS = 32


def quantize_8_bits(weights: Weights, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each output row or 128x128 block by the formulas of the module; edge blocks may be partial.

    Args:
        weights: BF16 [N, K], [E, N, K] with any stride between experts, or E tensors [N, K]; each expert contiguous.
        kind: one of `DTYPES`.

    Returns:
        w8: [E, N, K]; scale: FP32 [E, N, 1], or [E, ceil(N/128), ceil(K/128)] of blocks, both without E for one tensor
        [N, K]; nonfinite: [1] int32 on the device, the number of rows or blocks that hold NaN or Inf.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.
    """
    max_columns = MAX_COLUMNS if kind in _ROW_KERNELS else None
    tensors, stacked = expert_weights(f"quantize_8_bits to {kind}", weights, VECTOR, max_columns)
    with torch.no_grad():
        w8, scale, nonfinite = torch.ops.qarl.quantize_8_bits(tensors, kind)
    return (w8, scale, nonfinite) if stacked else (w8[0], scale[0], nonfinite)


@torch.library.custom_op("qarl::quantize_8_bits", mutates_args=())
def _quantize_8_bits(weights: list[Tensor], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    results = _empty_results(weights, kind)
    experts, rows, columns = stack_shape(weights)
    words = columns // VECTOR
    with torch.cuda.device_of(weights[0]):
        table, alignment = address_table(weights)
        if kind == "fp8_blocks":
            _fp8_block_quantize_kernel[results[1][0].numel(), experts](
                table, *results, rows, words, ALIGNMENT=alignment, num_warps=_BLOCK_WARPS
            )
        else:
            tile_rows, spread, depth, num_warps = row_tile(words, width=1)
            _ROW_KERNELS[kind][triton.cdiv(rows, tile_rows), experts](
                table, *results, rows, WORDS=words, TILE_ROWS=tile_rows, SPREAD=spread, DEPTH=depth,
                ALIGNMENT=alignment, num_warps=num_warps,
            )  # fmt: skip
    return results


@_quantize_8_bits.register_fake
def _empty_results(weights: list[Tensor], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    experts, rows, columns = stack_shape(weights)
    device = weights[0].device
    scales = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)) if kind == "fp8_blocks" else (rows, 1)
    return (
        torch.empty(experts, rows, columns, dtype=DTYPES[kind], device=device),
        torch.empty(experts, *scales, dtype=torch.float32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


def dequantize_8_bits(w8: Tensor, scale: Tensor, *, block: bool = False) -> Tensor:
    """Return bf16(w8 * scale) with one scale for each row, or for each 128x128 block.

    Args:
        w8: [..., N, K], contiguous, K a multiple of 8; FP8, int8, or BF16 that other scales were multiplied into.
        scale: [..., N, 1] FP32, or [..., ceil(N/128), ceil(K/128)] of blocks; contiguous.
        block: which of the two.

    Returns:
        [..., N, K] BF16.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `weights.QuantizedWeight.dequantize`.
    """
    problems = device_problems([w8, scale])
    if w8.dtype not in _SCALED_DTYPES or scale.dtype != torch.float32:
        legal = f"one of {', '.join(map(str, _SCALED_DTYPES))}; torch.float32"
        problems.append(f"w8 is {w8.dtype} and scale {scale.dtype} (legal: {legal})")
    if w8.ndim < 2 or w8.numel() == 0 or w8.shape[-1] % VECTOR:
        problems.append(f"w8 is {list(w8.shape)} (legal: [..., N, K], not empty, K a multiple of {VECTOR})")
    blocks = tuple(-(-size // FP8_BLOCK) for size in w8.shape[-2:])
    legal_shape = (*w8.shape[:-2], *blocks) if block else (*w8.shape[:-1], 1)
    if tuple(scale.shape) != legal_shape:
        problems.append(f"scale is {list(scale.shape)} (legal: {list(legal_shape)})")
    if not (w8.is_contiguous() and scale.is_contiguous()):
        problems.append(f"strides {w8.stride()} and {scale.stride()} (legal: w8 and scale contiguous)")
    refuse("dequantize_8_bits", problems)
    with torch.no_grad():
        return torch.ops.qarl.dequantize_8_bits(w8, scale, block)


@torch.library.custom_op("qarl::dequantize_8_bits", mutates_args=())
def _dequantize_8_bits(w8: Tensor, scale: Tensor, block: bool) -> Tensor:
    weight = torch.empty_like(w8, dtype=torch.bfloat16)
    rows, columns = w8.shape[-2:]
    grid = triton.cdiv(rows, _DEQUANTIZE_ROWS) * triton.cdiv(columns, FP8_BLOCK), w8.numel() // (rows * columns)
    with torch.cuda.device_of(w8):
        _dequantize_kernel[grid](
            w8, scale, weight, rows, columns // VECTOR, SCALE_ROWS=FP8_BLOCK if block else 1, COLUMN_SCALES=block,
            TILE_ROWS=_DEQUANTIZE_ROWS,
        )  # fmt: skip
    return weight


@_dequantize_8_bits.register_fake
def _(w8: Tensor, *_: object) -> Tensor:
    return torch.empty_like(w8, dtype=torch.bfloat16)
