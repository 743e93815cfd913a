"""Quantize activations to 8 bits per token (FP8 or INT8) or per 1x128 group (FP8), as `fp8.py` and `int8.py` do.

The activations are x, or SwiGLU of x, for `swiglu.py`, which has its rounding points.

`token_rounding.py` has the formulas of tokens. A group's are scale = max(amax / 448, floor) and a8 = fp8(x / scale),
with correctly rounded divisions. x is BF16 or FP32 [M, K], contiguous; the scales are FP32. One program holds a whole
row (or 16 groups) in registers, so that memory is read once; this limits a row to 32768 columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_formats import FP8_BLOCK, ActivationKind
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import divide, largest_magnitude, silu, silu_by_sigmoid
from qarl_kernels.ops.token_rounding import TOKEN_DTYPES, floored_scale, kind_problems, token_scale, token_values

MAX_COLUMNS = 32768
FLOATS = (torch.bfloat16, torch.float32)
_COLUMNS_PER_WARP = 1024  # 32 elements, four 16-byte BF16 loads, in flight per thread
_GROUPS_PER_PROGRAM, _SWIGLU_GROUPS_PER_PROGRAM = 16, 8


def row_tiles(columns: int) -> tuple[int, int, int]:
    """Split a row among the threads of one program: tiles of 8 elements per thread, at most 4 tiles.

    Args:
        columns: length of the row, at most `MAX_COLUMNS`.

    Returns:
        Columns per tile, number of tiles, warps of the program.
    """
    num_warps = triton.next_power_of_2(max(1, triton.cdiv(columns, _COLUMNS_PER_WARP)))
    tile = 256 * num_warps
    return tile, triton.cdiv(columns, tile), num_warps


@triton.jit
def rounded_swiglu(gate, up):
    """bf16(bf16(silu(gate)) * up)."""
    activated = silu(gate.to(tl.float32)).to(tl.bfloat16)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _activations(x_ptr, row, column, K: tl.constexpr, SWIGLU: tl.constexpr):
    if SWIGLU:
        gate_ptrs = x_ptr + row * (2 * K) + column
        gate = tl.load(gate_ptrs, mask=column < K, other=0.0)
        up = tl.load(gate_ptrs + K, mask=column < K, other=0.0)
        values = rounded_swiglu(gate, up)
    else:
        values = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0)
    return values


@triton.jit
def _quantize_token_kernel(
    x_ptr,  # [M, K], or [M, 2 K] if SWIGLU
    a8_ptr,  # [M, K]
    scale_ptr,  # [M]
    K: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    DENSE: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([TILE], tl.float32)
    tiles = ()
    for tile in tl.static_range(TILES):
        column = tile * TILE + tl.arange(0, TILE)
        values = _activations(x_ptr, row, column, K, SWIGLU)
        magnitude = tl.abs(values.to(tl.float32))
        largest = tl.maximum(largest, magnitude, propagate_nan=tl.PropagateNan.ALL)
        tiles = tiles + (values,)  # noqa: RUF005
    scale, factor = token_scale(largest_magnitude(largest, 0), KIND, DENSE)
    tl.store(scale_ptr + row, scale)
    for tile in tl.static_range(TILES):
        column = tile * TILE + tl.arange(0, TILE)
        a8 = token_values(tiles[tile].to(tl.float32), factor, KIND, DENSE)
        tl.store(a8_ptr + row * K + column, a8, mask=column < K)


@triton.jit
def _quantize_group_kernel(
    x_ptr,  # [num_groups, GROUP], or [M, 2 INNER] if INNER is not 0
    a8_ptr,  # [num_groups, GROUP]
    scale_ptr,  # [num_groups]
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    AFTER_SWIGLU: tl.constexpr,
    INNER: tl.constexpr,  # columns of the SwiGLU that comes first; 0: none does
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = group < num_groups
    if INNER > 0:
        # A row of x has twice as many groups as a row of the output, so each row shifts the index by INNER / GROUP.
        gate_group = group + group // (INNER // GROUP) * (INNER // GROUP)
        gate_ptrs = x_ptr + gate_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        gate = tl.load(gate_ptrs, mask=exists[:, None], other=0.0).to(tl.float32)
        up = tl.load(gate_ptrs + INNER, mask=exists[:, None], other=0.0).to(tl.float32)
        values = silu_by_sigmoid(gate) * up
    else:
        values = tl.load(x_ptr + offsets, mask=exists[:, None], other=0.0).to(tl.float32)
    scale = floored_scale(largest_magnitude(values, 1), not AFTER_SWIGLU)
    tl.store(scale_ptr + group, scale, mask=exists)
    tl.store(a8_ptr + offsets, divide(values, scale[:, None]).to(tl.float8e4nv), mask=exists[:, None])


def quantize_token(x: Tensor, kind: ActivationKind = "fp8_token", *, dense: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize each token to FP8 or INT8 with the formulas of `token_rounding.py`.

    Args:
        x: [M, K] BF16 or FP32, contiguous.
        kind: `fp8_token` or `int8_token`.
        dense: whether a dense layer multiplies them, and not a routed expert; `fp8_token` is the same for both.

    Returns:
        a8: [M, K] float8_e4m3fn or int8; scale: [M, 1] FP32.

    Raises:
        ValueError: shape, dtype, device or kind is not supported.

    Source: `qarl_kernels.fp8.quantize_token`, `qarl_kernels.int8.quantize_token`.
    """
    problems = tensor_problems("x", x, FLOATS) + kind_problems(kind)
    if x.dim() == 2 and not 1 <= x.shape[1] <= MAX_COLUMNS:
        problems.append(f"x has {x.shape[1]} columns (legal: 1 .. {MAX_COLUMNS})")
    refuse("quantize_token", problems)
    return _quantize_token(x, kind, dense, False)


def quantize_group(x: Tensor, *, after_swiglu: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize 1x128 groups: scale = max(amax, 1e-10) / 448, or max(amax / 448, 1/(448*512)) after SwiGLU.

    Args:
        x: [M, K] BF16 or FP32, contiguous, K a multiple of 128.
        after_swiglu: use the floor of the engine's fused SwiGLU quantizer.

    Returns:
        a8: [M, K] float8_e4m3fn; scale: [M, K / 128] FP32.

    Raises:
        ValueError: shape, dtype or device is not supported.

    Source: `qarl_kernels.fp8.quantize_group`.
    """
    problems = tensor_problems("x", x, FLOATS)
    if x.dim() == 2 and x.shape[1] % FP8_BLOCK:
        problems.append(f"x has {x.shape[1]} columns (legal: multiples of {FP8_BLOCK})")
    refuse("quantize_group", problems)
    return _quantize_group(x, after_swiglu, False)


@torch.library.custom_op("qarl::quantize_token", mutates_args=())
def _quantize_token(x: Tensor, kind: str, dense: bool, swiglu: bool) -> tuple[Tensor, Tensor]:
    a8, scale = _quantize_token_fake(x, kind, dense, swiglu)
    rows, columns = a8.shape
    tile, tiles, num_warps = row_tiles(columns)
    _quantize_token_kernel[(rows,)](x, a8, scale, columns, tile, tiles, kind, dense, swiglu, num_warps=num_warps)
    return a8, scale


@_quantize_token.register_fake
def _quantize_token_fake(x: Tensor, kind: str, dense: bool, swiglu: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    a8 = x.new_empty(x.shape[0], x.shape[1] // (1 + swiglu), dtype=TOKEN_DTYPES[kind])
    return a8, x.new_empty(x.shape[0], 1, dtype=torch.float32)


@torch.library.custom_op("qarl::quantize_group", mutates_args=())
def _quantize_group(x: Tensor, after_swiglu: bool, swiglu: bool) -> tuple[Tensor, Tensor]:
    a8, scale = _quantize_group_fake(x, after_swiglu, swiglu)
    groups, inner = (_SWIGLU_GROUPS_PER_PROGRAM, a8.shape[1]) if swiglu else (_GROUPS_PER_PROGRAM, 0)
    _quantize_group_kernel[(triton.cdiv(scale.numel(), groups),)](
        x, a8, scale, scale.numel(), FP8_BLOCK, groups, after_swiglu, inner, num_warps=2
    )
    return a8, scale


@_quantize_group.register_fake
def _quantize_group_fake(x: Tensor, after_swiglu: bool, swiglu: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    rows, columns = x.shape[0], x.shape[1] // (1 + swiglu)
    scale = x.new_empty(rows, columns // FP8_BLOCK, dtype=torch.float32)
    return x.new_empty(rows, columns, dtype=torch.float8_e4m3fn), scale
