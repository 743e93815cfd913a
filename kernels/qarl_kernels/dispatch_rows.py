"""The expert MLP in two halves, for experts on other ranks than the tokens; implementations as in `dispatch.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qarl_formats import QuantFormat
from qarl_kernels.dispatch import Weights, runs_kernels
from qarl_kernels.expert_rows import combine_rows_reference, expert_rows_backward_reference, expert_rows_reference
from qarl_kernels.gemm import GemmOperand


def expert_rows(
    rows: Tensor, offsets: Tensor, row_weight: Tensor, fc1: GemmOperand, fc2: GemmOperand
) -> tuple[Tensor, Tensor]:
    """Run rows sorted by expert through their experts: the half of `expert_mlp` that runs where the experts are.

    Args:
        rows: [M, H] BF16 or FP32.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 router weights; multiplied here only by formats that do (`weights_rows`).
        fc1: [E, 2 I, H], gate rows before up rows.
        fc2: [E, H, I].

    Returns:
        out rows [M, H] for `combine_rows`; fc1's output [M, 2 I], which the backward needs; both in rows' dtype.

    Raises:
        ValueError: a shape the kernels cannot take, with the legal ones.
    """
    if not len(rows):
        return torch.empty_like(rows), rows.new_empty(0, fc1.values.shape[-2])
    if runs_kernels(rows):
        from qarl_kernels.ops.mlp import mlp_rows
        from qarl_kernels.ops.operand_gemm import quantize_rows

        weight = row_weight if fc1.format.weights_rows else None
        return mlp_rows(quantize_rows(rows, fc1.format), offsets, weight, fc1, fc2)
    return expert_rows_reference(rows, offsets, row_weight, fc1, fc2)


def expert_rows_backward(
    grad_rows: Tensor,
    rows: Tensor,
    hidden: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fmt: QuantFormat,
    into: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Weights, Weights]:
    """Differentiate the weighted rows w * `expert_rows`, wherever the forward multiplies w.

    Args:
        grad_rows: [M, H], the gradient of each weighted output row.
        rows: [M, H].
        hidden: [M, 2 I], fc1's output.
        offsets: [E + 1] int32.
        row_weight: [M] FP32.
        gate_up: [E, 2 I, H] for the input gradient.
        down: [E, H, I] for the input gradient.
        fmt: what the forward ran.
        into: E tensors [2 I, H] and E tensors [H, I] to add the weight gradients to.

    Returns:
        gradients of rows, row_weight [M] FP32, gate_up and down, or what they were added to.
    """
    if not len(rows):
        grads = into or (torch.zeros_like(gate_up), torch.zeros_like(down))
        return torch.empty_like(rows), torch.empty_like(row_weight), *grads
    if runs_kernels(rows):
        from qarl_kernels.ops.mlp import mlp_rows_backward

        return mlp_rows_backward(grad_rows, rows, hidden, offsets, row_weight, gate_up, down, fmt, into)
    *inputs, grad_gate_up, grad_down = expert_rows_backward_reference(
        grad_rows, rows, hidden, offsets, row_weight, gate_up, down, fmt
    )
    if into is None:
        return *inputs, grad_gate_up, grad_down
    for targets, grads in zip(into, (grad_gate_up, grad_down), strict=True):
        for target, grad in zip(targets, grads, strict=True):
            target.add_(grad)
    return *inputs, *into


def combine_rows(rows: Tensor, inverse: Tensor, topk_weight: Tensor, fmt: QuantFormat) -> Tensor:
    """Sum each token's rows in the order of its choices: the half of `expert_mlp` that runs where the tokens are.

    Args:
        rows: [T * k, H] from `expert_rows`, sorted by expert.
        inverse: [T * k] int64 from `RoutedRows`.
        topk_weight: [T, k] FP32; unused if the rows are weighted already (`weights_rows`).
        fmt: the format.

    Returns:
        [T, H] in rows' dtype.
    """
    if runs_kernels(rows):
        from qarl_kernels.ops import combine

        if fmt.weights_rows:
            return combine.combine_rows(rows, inverse, None, None, top_k=topk_weight.shape[1])
        return combine.combine_rows(rows, inverse, topk_weight, fmt.router_weight)
    return combine_rows_reference(rows, inverse, topk_weight, fmt)


def spread_rows(x: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Return the tokens' rows sorted by expert, out[inverse[c]] = x[c // top_k]: the transpose of a plain sum of rows.

    Args:
        x: [T, H] BF16 or FP32.
        inverse: [T * top_k] int64 from `RoutedRows`.
        top_k: choices per token.

    Returns:
        [T * top_k, H].
    """
    if runs_kernels(x):
        from qarl_kernels.ops import routing

        return routing.spread_rows(x.contiguous(), inverse, top_k)
    out = x.new_empty(len(inverse), x.shape[1])
    out[inverse] = x.repeat_interleave(top_k, 0)
    return out
