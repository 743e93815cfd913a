"""SwiGLU on the rows of fc1, alone or fused with the activation quantization of `activations.py`.

hidden is BF16 [M, 2 I], gate columns before up columns; silu(g) = g / (1 + exp(-g)) in FP32. Rounding points follow the
engine: A = bf16(bf16(silu(gate)) * up), except before 1x128 groups, where the FP32 product stays unrounded. Each
operator reads its inputs once. The backward is in `swiglu_backward.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_formats import FP8_BLOCK, ActivationKind
from qarl_kernels.ops.activations import MAX_COLUMNS, rounded_swiglu
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.token_rounding import kind_problems

_ROWS, _COLUMNS = 8, 256  # one program's elements


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
    tl.store(out_ptr + row[:, None] * INNER + column[None, :], rounded_swiglu(gate, up), mask=mask)


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
    return torch.ops.qarl.quantize_token(hidden, kind, False, True)


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
    return torch.ops.qarl.quantize_group(hidden, True, True)


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
