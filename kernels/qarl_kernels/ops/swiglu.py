"""SwiGLU on the rows of fc1, alone or fused with the activation quantization.

hidden is BF16 [M, 2 I], gate columns before up columns; silu(g) = g / (1 + exp(-g)) in FP32. Rounding points follow the
engine: A = bf16(bf16(silu(gate)) * up), except before 1x128 groups, where the FP32 product stays unrounded. Each
operator reads its inputs once. The backward is in `swiglu_backward.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_formats import FP8_BLOCK, ActivationKind
from qarl_kernels.ops.activations import MAX_COLUMNS, row_tiles
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import divide, largest_magnitude, silu, silu_by_sigmoid
from qarl_kernels.ops.token_rounding import TOKEN_DTYPES, floored_scale, kind_problems, token_scale, token_values

_ROWS, _COLUMNS = 8, 256  # one program's elements in the kernels without a reduction
_GROUPS_PER_PROGRAM = 8


@triton.jit
def _rounded_swiglu(gate, up):
    """bf16(bf16(silu(gate)) * up)."""
    activated = silu(gate.to(tl.float32)).to(tl.bfloat16)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _swiglu_kernel(
    hidden_ptr,  # [M, 2 I]
    out_ptr,  # [M, I]
    M,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < M)[:, None] & (column < INNER)[None, :]
    gate_ptrs = hidden_ptr + row[:, None] * (2 * INNER) + column[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0)
    up = tl.load(gate_ptrs + INNER, mask=mask, other=0.0)
    tl.store(out_ptr + row[:, None] * INNER + column[None, :], _rounded_swiglu(gate, up), mask=mask)


@triton.jit
def _swiglu_quantize_token_kernel(
    hidden_ptr,  # [M, 2 I]
    a8_ptr,  # [M, I]
    scale_ptr,  # [M]
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([TILE], tl.float32)
    tiles = ()
    for tile in tl.static_range(TILES):
        column = tile * TILE + tl.arange(0, TILE)
        gate_ptrs = hidden_ptr + row * (2 * INNER) + column
        gate = tl.load(gate_ptrs, mask=column < INNER, other=0.0)
        up = tl.load(gate_ptrs + INNER, mask=column < INNER, other=0.0)
        product = _rounded_swiglu(gate, up)
        largest = tl.maximum(largest, tl.abs(product.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
        tiles = tiles + (product,)  # noqa: RUF005
    scale, factor = token_scale(largest_magnitude(largest, 0), KIND, False)
    tl.store(scale_ptr + row, scale)
    for tile in tl.static_range(TILES):
        column = tile * TILE + tl.arange(0, TILE)
        a8 = token_values(tiles[tile].to(tl.float32), factor, KIND, False)
        tl.store(a8_ptr + row * INNER + column, a8, mask=column < INNER)


@triton.jit
def _swiglu_quantize_group_kernel(
    hidden_ptr,  # [M, 2 I]
    a8_ptr,  # [M * I // GROUP, GROUP]
    scale_ptr,  # [M * I // GROUP]
    num_groups,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    exists = (group < num_groups)[:, None]
    # A row of hidden has twice as many groups as a row of the output, so each row shifts the index by I / GROUP.
    gate_group = group + group // (INNER // GROUP) * (INNER // GROUP)
    gate_ptrs = hidden_ptr + gate_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    gate = tl.load(gate_ptrs, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + INNER, mask=exists, other=0.0).to(tl.float32)
    product = silu_by_sigmoid(gate) * up
    scale = floored_scale(largest_magnitude(product, 1), False)
    tl.store(scale_ptr + group, scale, mask=group < num_groups)
    out_ptrs = a8_ptr + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptrs, divide(product, scale[:, None]).to(tl.float8e4nv), mask=exists)


def swiglu(hidden: Tensor) -> Tensor:
    """Return A = bf16(bf16(silu(gate)) * up).

    Args:
        hidden: [M, 2 I] BF16, contiguous, gate columns before up columns.

    Returns:
        [M, I] BF16.

    Raises:
        ValueError: shape, dtype or device is not supported.

    Source: vLLM 0.25.1 csrc/libtorch_stable/activation_kernels.cu; `qarl_kernels.expert_mlp.swiglu`.
    """
    refuse("swiglu", _hidden_problems(hidden))
    return _swiglu(hidden)


def swiglu_quantize_token(hidden: Tensor, kind: ActivationKind = "fp8_token") -> tuple[Tensor, Tensor]:
    """Quantize A = bf16(bf16(silu(gate)) * up) per token with the formulas of `token_rounding.py`.

    Args:
        hidden: [M, 2 I] BF16, contiguous, gate columns before up columns.
        kind: `fp8_token` or `int8_token`.

    Returns:
        a8: [M, I] float8_e4m3fn or int8; scale: [M, 1] FP32.

    Raises:
        ValueError: shape, dtype, device or kind is not supported.

    Source: `quantize_token` in `qarl_kernels.fp8` and `qarl_kernels.int8`, of `qarl_kernels.expert_mlp.swiglu`.
    """
    problems = _hidden_problems(hidden) + kind_problems(kind)
    if hidden.dim() == 2 and hidden.shape[1] > 2 * MAX_COLUMNS:
        problems.append(f"hidden has {hidden.shape[1]} columns (legal: at most {2 * MAX_COLUMNS})")
    refuse("swiglu_quantize_token", problems)
    return _swiglu_quantize_token(hidden, kind)


def swiglu_quantize_group(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize P = silu(gate) * up (FP32) in 1x128 groups: scale = max(amax / 448, 1/(448*512)), a8 = fp8(P / scale).

    Args:
        hidden: [M, 2 I] BF16, contiguous, gate columns before up columns, I a multiple of 128.

    Returns:
        a8: [M, I] float8_e4m3fn; scale: [M, I / 128] FP32.

    Raises:
        ValueError: shape, dtype or device is not supported.

    Source: `qarl_kernels.fp8.quantize_group(after_swiglu=True)`; vLLM 0.25.1 fused_silu_mul_block_quant.cu.
    """
    problems = _hidden_problems(hidden)
    if hidden.dim() == 2 and hidden.shape[1] % (2 * FP8_BLOCK):
        problems.append(f"hidden has {hidden.shape[1]} columns (legal: multiples of {2 * FP8_BLOCK})")
    refuse("swiglu_quantize_group", problems)
    return _swiglu_quantize_group(hidden)


def _hidden_problems(hidden: Tensor) -> list[str]:
    problems = tensor_problems("hidden", hidden, (torch.bfloat16,))
    if hidden.dim() == 2 and (hidden.shape[1] % 2 or not hidden.shape[1]):
        problems.append(f"hidden has {hidden.shape[1]} columns (legal: a positive even number, gate and up)")
    return problems


@torch.library.custom_op("qarl::swiglu", mutates_args=())
def _swiglu(hidden: Tensor) -> Tensor:
    out = _swiglu_fake(hidden)
    rows, inner = out.shape
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(inner, _COLUMNS)
    _swiglu_kernel[grid](hidden, out, rows, inner, _ROWS, _COLUMNS, num_warps=4)
    return out


@_swiglu.register_fake
def _swiglu_fake(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)


@torch.library.custom_op("qarl::swiglu_quantize_token", mutates_args=())
def _swiglu_quantize_token(hidden: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    a8, scale = _swiglu_quantize_token_fake(hidden, kind)
    rows, inner = a8.shape
    tile, tiles, num_warps = row_tiles(inner)
    _swiglu_quantize_token_kernel[(rows,)](hidden, a8, scale, inner, tile, tiles, kind, num_warps=num_warps)
    return a8, scale


@_swiglu_quantize_token.register_fake
def _swiglu_quantize_token_fake(hidden: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    a8 = hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2, dtype=TOKEN_DTYPES[kind])
    return a8, hidden.new_empty(hidden.shape[0], 1, dtype=torch.float32)


@torch.library.custom_op("qarl::swiglu_quantize_group", mutates_args=())
def _swiglu_quantize_group(hidden: Tensor) -> tuple[Tensor, Tensor]:
    a8, scale = _swiglu_quantize_group_fake(hidden)
    num_groups = scale.numel()
    _swiglu_quantize_group_kernel[(triton.cdiv(num_groups, _GROUPS_PER_PROGRAM),)](
        hidden, a8, scale, num_groups, a8.shape[1], FP8_BLOCK, _GROUPS_PER_PROGRAM, num_warps=2
    )
    return a8, scale


@_swiglu_quantize_group.register_fake
def _swiglu_quantize_group_fake(hidden: Tensor) -> tuple[Tensor, Tensor]:
    rows, inner = hidden.shape[0], hidden.shape[1] // 2
    a8 = hidden.new_empty(rows, inner, dtype=torch.float8_e4m3fn)
    return a8, hidden.new_empty(rows, inner // FP8_BLOCK, dtype=torch.float32)
