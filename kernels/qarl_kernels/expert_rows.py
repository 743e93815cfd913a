"""The two halves of the expert MLP under expert parallelism: rows where the experts are, sums where the tokens are.

Every row and every sum has the bits of `expert_mlp_reference`, whichever rank an expert is on.
"""

from typing import assert_never

import torch
from torch import Tensor

from qarl_formats import FP8_BLOCK, QuantFormat
from qarl_kernels import fp8, int8
from qarl_kernels.expert_mlp import combine_choices, sum_in_order, swiglu
from qarl_kernels.gemm import GemmOperand, grouped_gemm, grouped_input_grad, grouped_weight_grad
from qarl_kernels.routing import rows_scale


def expert_rows_reference(
    rows: Tensor, offsets: Tensor, row_weight: Tensor, fc1: GemmOperand, fc2: GemmOperand
) -> tuple[Tensor, Tensor]:
    """Run rows sorted by expert through their experts; see `qarl_kernels.dispatch_rows.expert_rows`."""
    fmt = fc1.format
    hidden = grouped_gemm(rows, fc1, offsets, out_dtype=rows.dtype)
    activation = swiglu(hidden, fmt)
    if fmt.router_weight == "scaled_product":
        assert fc2.tensor_scale is not None
        out = grouped_gemm(activation, fc2.unscaled(), offsets, out_dtype=rows.dtype)
        weight = row_weight * rows_scale(fc2.tensor_scale, offsets, len(rows))
        return out * weight.to(rows.dtype).unsqueeze(-1), hidden
    if fmt.router_weight != "on_accumulator":
        return grouped_gemm(activation, fc2, offsets, out_dtype=rows.dtype, after_swiglu=True), hidden
    out = grouped_gemm(activation, fc2, offsets, out_dtype=torch.float32, after_swiglu=True)
    return (out * row_weight.unsqueeze(-1)).to(rows.dtype), hidden


def expert_rows_backward_reference(
    grad_rows: Tensor,
    rows: Tensor,
    hidden: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fmt: QuantFormat,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Differentiate `w * expert_rows` by hand; see `qarl_kernels.dispatch_rows.expert_rows_backward`."""
    weight = row_weight.unsqueeze(-1)
    grad_activation = grouped_input_grad(grad_rows, down, offsets)
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        activation = swiglu(leaf, fmt)
    (grad_hidden,) = torch.autograd.grad(activation, leaf, (grad_activation * weight).to(activation.dtype))
    activation = activation.detach()
    grad_weight = (grad_activation.float() * _multiplied(activation, fmt)).sum(-1)
    grad_down = grouped_weight_grad(grad_rows, (activation * weight).to(grad_rows.dtype), offsets)
    grad_gate_up = grouped_weight_grad(grad_hidden, rows, offsets)
    return grouped_input_grad(grad_hidden, gate_up, offsets), grad_weight, grad_gate_up, grad_down


def _multiplied(activation: Tensor, fmt: QuantFormat) -> Tensor:
    # With fc2's actual input a_q, da . a_q is the gradient of the router weight that ran.
    match fmt.activation_kind:
        case "none":
            return activation.float()
        case "fp8_token":
            values, scale = fp8.quantize_token(activation)
            return values.float() * scale
        case "int8_token":
            values, scale = int8.quantize_token(activation, dense=False)
            return values.float() * scale
        case "fp8_group":
            values, scale = fp8.quantize_group(activation, after_swiglu=True)
            return values.float() * scale.repeat_interleave(FP8_BLOCK, -1)
        case unknown:
            assert_never(unknown)


def combine_rows_reference(rows: Tensor, inverse: Tensor, topk_weight: Tensor, fmt: QuantFormat) -> Tensor:
    """Sum each token's rows in the order of its choices; see `qarl_kernels.dispatch_rows.combine_rows`."""
    choices = rows[inverse].view(*topk_weight.shape, rows.shape[-1])
    if fmt.weights_rows:
        return sum_in_order(choices.float()).to(rows.dtype)
    return combine_choices(choices, topk_weight.unsqueeze(-1), fmt, rows.dtype)
