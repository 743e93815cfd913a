"""The straight-through expert MLP of one rank, and the weighted sum of what all ranks' experts return.

The forward is split where rows change ranks: `aligned_expert_rows` runs where the experts are, `combine_tokens` where
the tokens are. Wherever the forward multiplied the router weight, the backward leaves it to the experts' half: then the
sum's gradient is just a copy of each token's gradient to its k rows, and the experts' outputs need not be kept.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qarl_kernels import QuantFormat, combine_rows, expert_rows, expert_rows_backward, spread_rows
from qarl_nemo.layers.weight import AlignedWeight, straight_through_weight
from qarl_nemo.names import Backward


class _AlignedExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        row_weight: Tensor,
        offsets: Tensor,
        gate_up: AlignedWeight,
        down: AlignedWeight,
        backward: Backward,
        *masters: Tensor,
    ) -> Tensor:
        out, hidden = expert_rows(rows, offsets, row_weight, gate_up.operand(), down.operand())
        ctx.save_for_backward(rows, row_weight, offsets, hidden)
        ctx.gate_up, ctx.down, ctx.backward_choice = gate_up, down, backward
        ctx.changes = gate_up.changes.count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_weight, offsets, hidden = ctx.saved_tensors
        gate_up, down = ctx.gate_up, ctx.down
        assert ctx.changes == gate_up.changes.count, f"{gate_up.name} changed between forward and backward"
        masters = (gate_up.master, down.master)
        # Decided by the buffer, not by `gradient_accumulation_fusion`, which Megatron's own linears need Apex for.
        fused = hasattr(gate_up.master[0], "main_grad")
        into = tuple([one.main_grad for one in stack] for stack in masters) if fused else None
        grad_x, grad_weight, *grads = expert_rows_backward(
            grad_rows.contiguous(),
            rows,
            hidden,
            offsets,
            row_weight,
            straight_through_weight(gate_up, ctx.backward_choice),
            straight_through_weight(down, ctx.backward_choice),
            gate_up.format,
            into,
        )
        if fused:
            grads = [_already_added(stack) for stack in masters]
        return grad_x, grad_weight, None, None, None, None, *grads[0], *grads[1]


def _already_added(masters: list[nn.Parameter]) -> list[Tensor]:
    # Megatron's hooks fire only if there is a gradient; told that it was added already, they never read its values.
    placeholder = torch.empty_like(masters[0])
    for master in masters:
        master.grad_added_to_main_grad = True
        if getattr(master, "zero_out_wgrad", False):
            placeholder.zero_()
    return [placeholder.detach() for _ in masters]


def aligned_expert_rows(
    rows: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    gate_up: AlignedWeight,
    down: AlignedWeight,
    *,
    backward: Backward = "dequantized",
) -> Tensor:
    """Run rows sorted by expert through this rank's quantized experts, straight-through in the backward.

    Where masters have a `main_grad`, the backward adds the weight gradients to it, as Megatron's fused linears do.

    Args:
        rows: [M, H].
        row_weight: [M] FP32 router weights, multiplied here or by `combine_tokens`, as the format says.
        offsets: [E_local + 1] int32.
        gate_up: E_local masters [2 I, H].
        down: E_local masters [H, I].
        backward: which weights the input gradient uses.

    Returns:
        [M, H] in rows' dtype.

    Source: arXiv 2604.07853 section 3.1; Megatron-core 0.20 tensor_parallel/layers.py for `main_grad`.
    """
    return _AlignedExpertRows.apply(
        rows, row_weight.float(), offsets, gate_up, down, backward, *gate_up.master, *down.master
    )


class _CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor, topk_weight: Tensor, fmt: QuantFormat) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = topk_weight.shape[1]
        return combine_rows(rows.contiguous(), inverse, topk_weight, fmt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return spread_rows(grad_out, *ctx.saved_tensors, ctx.top_k), None, None, None


def combine_tokens(rows: Tensor, inverse: Tensor, topk_weight: Tensor, fmt: QuantFormat) -> Tensor:
    """Sum each token's expert outputs in FP32, in the order of its choices, with the format's rounding points.

    Args:
        rows: [T * k, H] from `aligned_expert_rows`, in any order.
        inverse: [T * k] int64, the row of each choice.
        topk_weight: [T, k] FP32; `aligned_expert_rows` returns its gradient.
        fmt: the format.

    Returns:
        [T, H] in rows' dtype.
    """
    return _CombineTokens.apply(rows, inverse, topk_weight.detach(), fmt)
