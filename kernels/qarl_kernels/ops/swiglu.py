"""SwiGLU on the rows of fc1, alone or fused with the activation quantization, and its backward.

hidden is BF16 [M, 2 I], gate columns before up columns; silu(g) = g / (1 + exp(-g)) in FP32. Rounding points follow the
engine: A = bf16(bf16(silu(gate)) * up), except before 1x128 groups, where the FP32 product stays unrounded. Each
operator reads its inputs once and keeps nothing but its outputs: the backward computes silu, and on request A for fc2's
weight gradient, again from hidden instead of loading what the forward would have had to save.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.formats import FP8_BLOCK
from qarl_kernels.ops.activations import FLOATS, MAX_COLUMNS, floored_scale, row_tiles
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import divide, exp, largest_magnitude, silu

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
    scale = floored_scale(largest_magnitude(largest, 0), False)
    tl.store(scale_ptr + row, scale)
    for tile in tl.static_range(TILES):
        column = tile * TILE + tl.arange(0, TILE)
        a8 = divide(tiles[tile].to(tl.float32), scale).to(tl.float8e4nv)
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
    # Groups of hidden's gate half lie I / GROUP further per row than those of the output.
    gate_group = group + group // (INNER // GROUP) * (INNER // GROUP)
    gate_ptrs = hidden_ptr + gate_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    gate = tl.load(gate_ptrs, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + INNER, mask=exists, other=0.0).to(tl.float32)
    product = silu(gate) * up
    scale = floored_scale(largest_magnitude(product, 1), False)
    tl.store(scale_ptr + group, scale, mask=group < num_groups)
    out_ptrs = a8_ptr + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptrs, divide(product, scale[:, None]).to(tl.float8e4nv), mask=exists)


@triton.jit
def _swiglu_backward_kernel(
    hidden_ptr,  # [M, 2 I]
    grad_ptr,  # [M, I]
    grad_hidden_ptr,  # [M, 2 I]
    activation_ptr,  # [M, I]
    M,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_ACTIVATION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < M)[:, None] & (column < INNER)[None, :]
    wide = row[:, None] * (2 * INNER) + column[None, :]
    narrow = row[:, None] * INNER + column[None, :]
    gate = tl.load(hidden_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + wide + INNER, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + narrow, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_hidden_ptr + wide, (grad * up * slope).to(tl.bfloat16), mask=mask)
    tl.store(grad_hidden_ptr + wide + INNER, (grad * gate * sigmoid).to(tl.bfloat16), mask=mask)
    if WITH_ACTIVATION:
        tl.store(activation_ptr + narrow, _rounded_swiglu(gate, up), mask=mask)


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


def swiglu_quantize_token(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize A = bf16(bf16(silu(gate)) * up) per token: scale = max(amax / 448, 1/(448*512)), a8 = fp8(A / scale).

    Args:
        hidden: [M, 2 I] BF16, contiguous, gate columns before up columns.

    Returns:
        a8: [M, I] float8_e4m3fn; scale: [M, 1] FP32.

    Raises:
        ValueError: shape, dtype or device is not supported.

    Source: `qarl_kernels.fp8.quantize_token` of `qarl_kernels.expert_mlp.swiglu`.
    """
    problems = _hidden_problems(hidden)
    if hidden.dim() == 2 and hidden.shape[1] > 2 * MAX_COLUMNS:
        problems.append(f"hidden has {hidden.shape[1]} columns (legal: at most {2 * MAX_COLUMNS})")
    refuse("swiglu_quantize_token", problems)
    return _swiglu_quantize_token(hidden)


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


def swiglu_backward(hidden: Tensor, grad: Tensor, *, with_activation: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return d/dgate = grad * up * s * (1 + gate * (1 - s)) and d/dup = grad * gate * s, with s = sigmoid(gate).

    Args:
        hidden: [M, 2 I] BF16, contiguous, the forward's input.
        grad: [M, I] BF16 or FP32, contiguous, of the forward's output.
        with_activation: also compute the forward's output again.

    Returns:
        grad_hidden: [M, 2 I] BF16, rounded once; activation: [M, I] BF16, bit-equal to `swiglu(hidden)`, or None.

    Raises:
        ValueError: shape, dtype or device is not supported.
    """
    problems = _hidden_problems(hidden) + tensor_problems("grad", grad, FLOATS)
    if hidden.dim() == 2 and grad.shape != (hidden.shape[0], hidden.shape[1] // 2):
        legal = [hidden.shape[0], hidden.shape[1] // 2]
        problems.append(f"grad is {list(grad.shape)} (legal for hidden {list(hidden.shape)}: {legal})")
    refuse("swiglu_backward", problems)
    if with_activation:
        return _swiglu_backward_with_activation(hidden, grad)
    return _swiglu_backward(hidden, grad), None


def _hidden_problems(hidden: Tensor) -> list[str]:
    problems = tensor_problems("hidden", hidden, (torch.bfloat16,))
    if hidden.dim() == 2 and (hidden.shape[1] % 2 or not hidden.shape[1]):
        problems.append(f"hidden has {hidden.shape[1]} columns (legal: a positive even number, gate and up)")
    return problems


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)


@torch.library.custom_op("qarl::swiglu", mutates_args=())
def _swiglu(hidden: Tensor) -> Tensor:
    out = _swiglu_fake(hidden)
    rows, inner = out.shape
    _swiglu_kernel[_grid(rows, inner)](hidden, out, rows, inner, _ROWS, _COLUMNS, num_warps=4)
    return out


@_swiglu.register_fake
def _swiglu_fake(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)


@torch.library.custom_op("qarl::swiglu_quantize_token", mutates_args=())
def _swiglu_quantize_token(hidden: Tensor) -> tuple[Tensor, Tensor]:
    a8, scale = _swiglu_quantize_token_fake(hidden)
    rows, inner = a8.shape
    tile, tiles, num_warps = row_tiles(inner)
    _swiglu_quantize_token_kernel[(rows,)](hidden, a8, scale, inner, tile, tiles, num_warps=num_warps)
    return a8, scale


@_swiglu_quantize_token.register_fake
def _swiglu_quantize_token_fake(hidden: Tensor) -> tuple[Tensor, Tensor]:
    a8 = hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2, dtype=torch.float8_e4m3fn)
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


@torch.library.custom_op("qarl::swiglu_backward", mutates_args=())
def _swiglu_backward(hidden: Tensor, grad: Tensor) -> Tensor:
    grad_hidden = torch.empty_like(hidden)
    # Without an activation the kernel never touches its pointer.
    _launch_backward(hidden, grad, grad_hidden, grad_hidden, with_activation=False)
    return grad_hidden


@_swiglu_backward.register_fake
def _swiglu_backward_fake(hidden: Tensor, grad: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(hidden)


@torch.library.custom_op("qarl::swiglu_backward_with_activation", mutates_args=())
def _swiglu_backward_with_activation(hidden: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_hidden, activation = torch.empty_like(hidden), torch.empty_like(grad, dtype=torch.bfloat16)
    _launch_backward(hidden, grad, grad_hidden, activation, with_activation=True)
    return grad_hidden, activation


@_swiglu_backward_with_activation.register_fake
def _swiglu_backward_with_activation_fake(hidden: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(grad, dtype=torch.bfloat16)


def _launch_backward(
    hidden: Tensor, grad: Tensor, grad_hidden: Tensor, activation: Tensor, *, with_activation: bool
) -> None:
    rows, inner = grad.shape
    _swiglu_backward_kernel[_grid(rows, inner)](
        hidden, grad, grad_hidden, activation, rows, inner, _ROWS, _COLUMNS, with_activation, num_warps=4
    )
