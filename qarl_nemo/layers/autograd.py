"""The straight-through GEMM: a low-bit forward, and a backward in the master weight's precision.

Forward y = gemm(quantize(x), quantize(W)); backward dX = dY @ W (`dequantized`: the weight that ran; `high_precision`:
the master), dW = dY^T @ X with X the unquantized input, and db = sum of dY's rows: quantization counts as the identity.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl_kernels import grouped_gemm, grouped_input_grad, grouped_weight_grad, rows_scale
from qarl_nemo.layers.weight import ExecutedWeight, straight_through_weight
from qarl_nemo.names import Backward


class _AlignedGroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor | None,
        bias: Tensor | None,
        weight: ExecutedWeight,
        offsets: Tensor,
        out_dtype: torch.dtype,
        backward: Backward,
        after_swiglu: bool,
        unscaled: bool,
    ) -> Tensor:
        operand = weight.operand()
        ctx.save_for_backward(x, offsets)
        ctx.weight, ctx.changes = weight, weight.changes.count
        ctx.backward_choice = backward
        if operand.values.ndim == 2:
            operand = operand.stacked()
        ctx.left_out = operand.tensor_scale if unscaled else None
        operand = operand.unscaled() if unscaled else operand
        return grouped_gemm(x, operand, offsets, out_dtype=out_dtype, after_swiglu=after_swiglu, bias=bias)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets = ctx.saved_tensors
        needs_x, needs_master, needs_bias = ctx.needs_input_grad[:3]
        grad_bias = grad_out.sum(0) if needs_bias else None
        assert ctx.changes == ctx.weight.changes.count, f"{ctx.weight.name} changed between forward and backward"
        backward_weight = straight_through_weight(ctx.weight, ctx.backward_choice)
        stacked = backward_weight if backward_weight.ndim == 3 else backward_weight.unsqueeze(0)
        if ctx.left_out is not None:
            # The gradient of the scaled product, which is that of the whole weight.
            grad_out = grad_out / rows_scale(ctx.left_out, offsets, len(grad_out)).unsqueeze(-1)
        grad_out = grad_out.to(backward_weight.dtype).contiguous()
        grad_x = grouped_input_grad(grad_out, stacked, offsets).to(x.dtype) if needs_x else None
        grad_master = None
        if needs_master:
            grad_master = grouped_weight_grad(grad_out, x, offsets).view_as(backward_weight)
        return grad_x, grad_master, grad_bias, None, None, None, None, None, None


def aligned_grouped_gemm(
    x: Tensor,
    weight: ExecutedWeight,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    backward: Backward = "dequantized",
    after_swiglu: bool = False,
    unscaled: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply rows sorted by expert with the quantized weight, straight-through in the backward.

    Args:
        x: [M, K] rows.
        weight: [E, N, K], or [N, K] with offsets [0, M]; a frozen one has no gradient.
        offsets: [E + 1] int32.
        out_dtype: None = x's; FP32 returns the unrounded accumulator.
        backward: which weight the input gradient uses.
        after_swiglu: x is a SwiGLU output.
        unscaled: leave the operand's `tensor_scale` to the caller.
        bias: [N] of a dense layer, added where the format adds it.

    Returns:
        [M, N].

    Source: arXiv 2604.07853 section 3.1 (rollout-aligned forward, STE backward).
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    return _AlignedGroupedGemm.apply(
        x, weight.master, bias, weight, offsets, out_dtype, backward, after_swiglu, unscaled
    )
