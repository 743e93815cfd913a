"""The straight-through GEMM: low-bit forward, backward in the master weight's precision onto the master weight.

Forward y = gemm(quantize(x), quantize(W)); backward dX = dY @ W (`dequantized`: the weight that ran; `high_precision`:
the master) and dW = dY^T @ X with X the unquantized input: quantization counts as identity.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl_kernels import grouped_gemm
from qarl_nemo.layers.weight import AlignedWeight, BackwardMode, straight_through_weight


class _AlignedGroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        weight: AlignedWeight,
        offsets: list[int],
        out_dtype: torch.dtype,
        mode: BackwardMode,
        after_swiglu: bool,
    ) -> Tensor:
        operand = weight.operand()
        ctx.save_for_backward(x)
        ctx.weight, ctx.version = weight, weight.version.value
        ctx.offsets, ctx.mode = offsets, mode
        if operand.values.ndim == 2:
            operand = operand.stacked()
        return grouped_gemm(x, operand, offsets, out_dtype=out_dtype, after_swiglu=after_swiglu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        assert ctx.version == ctx.weight.version.value, f"{ctx.weight.name} changed between forward and backward"
        backward_weight = straight_through_weight(ctx.weight, ctx.mode)
        grad_out = grad_out.to(backward_weight.dtype)
        stacked = backward_weight if backward_weight.ndim == 3 else backward_weight.unsqueeze(0)
        grad_x = torch.empty_like(x)
        grad_master = torch.zeros_like(stacked)
        for index, (start, stop) in enumerate(pairwise(ctx.offsets)):
            if stop > start:
                rows = grad_out[start:stop]
                grad_x[start:stop] = rows @ stacked[index]
                grad_master[index] = rows.mT @ x[start:stop].to(rows.dtype)
        return grad_x, grad_master.view_as(backward_weight), None, None, None, None, None


def aligned_grouped_gemm(
    x: Tensor,
    weight: AlignedWeight,
    offsets: list[int],
    *,
    out_dtype: torch.dtype | None = None,
    mode: BackwardMode = "dequantized",
    after_swiglu: bool = False,
) -> Tensor:
    """Multiply rows sorted by expert with the quantized weight, straight-through in the backward.

    Args:
        x: [M, K] rows.
        weight: [E, N, K], or [N, K] with offsets [0, M].
        offsets: E + 1 row offsets.
        out_dtype: None = x's; FP32 returns the unrounded accumulator.
        mode: which weight the input gradient uses.
        after_swiglu: x is a SwiGLU output.

    Returns:
        [M, N].

    Source: arXiv 2604.07853 section 3.1 (rollout-aligned forward, STE backward).
    """
    return _AlignedGroupedGemm.apply(
        x, weight.master, weight, offsets, x.dtype if out_dtype is None else out_dtype, mode, after_swiglu
    )
