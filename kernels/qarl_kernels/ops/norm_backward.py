"""RMSNorm's gradients in FP32, with r = 1 / sqrt(mean(x^2) + eps) and d = w dy.

    dx = r (d - x r^2 mean(d x)),   dw = sum over rows of dy x r

Each program takes many rows and keeps its own part of dw. The parts are added in a fixed order, so that a GPU gives the
same sums every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.launch import num_sms
from qarl_kernels.ops.norm import MAX_NORM_COLUMNS

_ELEMENTS = 4096  # that one program takes at a time if rows are shorter
_PROGRAMS_PER_SM = 4


@triton.jit
def _norm_backward_kernel(
    grad_ptr,  # [M, H]
    x_ptr,  # [M, H]
    weight_ptr,  # [H]
    grad_x_ptr,  # [M, H]
    grad_weight_ptr,  # [programs, H] FP32
    M,
    eps,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    inside = column < H
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    grad_weight = tl.zeros([COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * H + column[None, :]
        mask = (row < M)[:, None] & inside[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)[:, None]
        normalized = x * scale
        direct = grad * weight
        along = tl.sum(direct * normalized, axis=1)[:, None] / H
        grad_x = scale * (direct - normalized * along)
        tl.store(grad_x_ptr + place, grad_x.to(tl.bfloat16), mask=mask)
        grad_weight += tl.sum(grad * normalized, axis=0)
    tl.store(grad_weight_ptr + tl.program_id(0) * H + column, grad_weight, mask=inside)


def rms_norm_backward_kernel(grad_out: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of y = x / sqrt(mean(x^2) + eps) * w.

    Args:
        grad_out: [M, H] BF16.
        x: [M, H] BF16; H at most `MAX_NORM_COLUMNS`.
        weight: [H] BF16.
        eps: added to the mean square.

    Returns:
        Gradients of x [M, H] and weight [H], BF16, each rounded once.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.
    """
    problems = tensor_problems("x", x, (torch.bfloat16,)) + tensor_problems("weight", weight, (torch.bfloat16,), 1)
    problems += tensor_problems("grad_out", grad_out, (torch.bfloat16,))
    for name, tensor, legal in (("grad_out", grad_out, x.shape), ("weight", weight, x.shape[-1:])):
        if tensor.shape != legal:
            problems.append(f"{name} has shape {list(tensor.shape)} (legal: {list(legal)})")
    if x.shape[-1] > MAX_NORM_COLUMNS:
        problems.append(f"x has {x.shape[-1]} columns (legal: up to {MAX_NORM_COLUMNS})")
    refuse("rms_norm_backward_kernel", problems)
    return _norm_backward_op(grad_out, x, weight, eps)


@torch.library.custom_op("qarl::rms_norm_backward", mutates_args=())
def _norm_backward_op(grad_out: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = x.shape
    columns = triton.next_power_of_2(num_columns)
    rows = max(_ELEMENTS // columns, 1)
    programs = max(min(triton.cdiv(num_rows, rows), _PROGRAMS_PER_SM * num_sms(x.device.index)), 1)
    grad_x = torch.empty_like(x)
    parts = torch.empty(programs, num_columns, dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(programs,)](
        grad_out, x, weight, grad_x, parts, num_rows, eps, H=num_columns, COLUMNS=columns, ROWS=rows, num_warps=8
    )
    return grad_x, parts.sum(0).to(weight.dtype)


@_norm_backward_op.register_fake
def _(grad_out: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(x), torch.empty_like(weight)
