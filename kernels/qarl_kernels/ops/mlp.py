"""The expert MLP on the kernels: one call for the forward, one for the backward.

Forward, by rows: quantize -> fc1 -> SwiGLU and quantize in one pass -> fc2, with the router weight in its epilogue if
the format puts it there. Tokens are quantized before they are copied to their experts: a row's scale does not depend on
where the row goes, and k times fewer rows are quantized. Backward in BF16, with g the output's gradient copied to rows:

    da = g W2,  dw = da . a_q,  [dg, du] = SwiGLU'(c1, w da),  dW2 = g^T (w a),  dW1 = [dg, du]^T x,  dx = [dg, du] W1

so neither fc2's output nor w g is ever stored. a_q is what fc2 multiplied: da . a_q = g . (W2 a_q).
"""

from torch import Tensor

from qarl_formats import QuantFormat
from qarl_kernels.gemm import GemmOperand
from qarl_kernels.ops.combine import combine_rows
from qarl_kernels.ops.operand_gemm import (
    QuantizedRows,
    input_grad,
    multiply_rows,
    quantize_rows,
    swiglu_rows,
    weight_grad,
)
from qarl_kernels.ops.routing import spread_rows
from qarl_kernels.ops.swiglu_backward import swiglu_backward
from qarl_kernels.routing import RoutedRows
from qarl_kernels.weights import Weights


def spread_tokens(x: Tensor, routed: RoutedRows, topk_weight: Tensor, fmt: QuantFormat) -> QuantizedRows:
    """Quantize tokens [T, H] as fc1 multiplies them, and copy each to the rows [T * k, H] of its experts."""
    top_k, tokens = topk_weight.shape[1], quantize_rows(x, fmt)
    scale = None if tokens.scale is None else spread_rows(tokens.scale, routed.inverse, top_k)
    return QuantizedRows(spread_rows(tokens.values, routed.inverse, top_k), scale)


def sum_choices(out_rows: Tensor, routed: RoutedRows, topk_weight: Tensor, fmt: QuantFormat) -> Tensor:
    """Sum each token's rows [T * k, H], weighted here where the format does so -> [T, H] BF16."""
    if fmt.router_weight == "weighted_sum":
        return combine_rows(out_rows, routed.inverse, topk_weight, "weighted_sum")
    return combine_rows(out_rows, routed.inverse, None, None, top_k=topk_weight.shape[1])


def mlp_rows(
    rows: QuantizedRows, offsets: Tensor, row_weight: Tensor | None, fc1: GemmOperand, fc2: GemmOperand
) -> tuple[Tensor, Tensor]:
    """Run rows sorted by expert through their experts: fc1 -> SwiGLU -> [quantize] -> fc2 [-> router weight].

    Args:
        rows: [M, H] as fc1 multiplies them.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 router weight of each row; unused by formats that weight the sum (`weighted_sum`). None
            leaves it to `combine_rows`.
        fc1: [E, 2 I, H].
        fc2: [E, H, I].

    Returns:
        out rows [M, H] BF16; fc1's output [M, 2 I] BF16, which the backward needs.
    """
    hidden = multiply_rows(rows, fc1, offsets)
    activation = swiglu_rows(hidden, fc1.format)
    weights_the_sum = fc1.format.router_weight == "weighted_sum"
    return multiply_rows(activation, fc2, offsets, row_weight=None if weights_the_sum else row_weight), hidden


def expert_mlp_forward(
    x: Tensor, routed: RoutedRows, topk_weight: Tensor, fc1: GemmOperand, fc2: GemmOperand
) -> tuple[Tensor, Tensor]:
    """Run routed tokens through their experts and sum: y = sum_k w_k fc2(SwiGLU(fc1(x))).

    Args:
        x: [T, H] BF16.
        routed: rows of the T * k choices.
        topk_weight: [T, k] FP32.
        fc1: [E, 2 I, H], gate rows before up rows.
        fc2: [E, H, I].

    Returns:
        [T, H] BF16; fc1's output [T * k, 2 I] BF16, which the backward needs.
    """
    rows = spread_tokens(x, routed, topk_weight, fc1.format)
    row_weight = topk_weight.reshape(-1)[routed.order]
    out_rows, hidden = mlp_rows(rows, routed.offsets, row_weight, fc1, fc2)
    return sum_choices(out_rows, routed, topk_weight, fc1.format), hidden


def mlp_rows_backward(
    grad_rows: Tensor,
    rows: Tensor,
    hidden: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fmt: QuantFormat,
    into: tuple[Weights, Weights] | None = None,
) -> tuple[Tensor, Tensor, Weights, Weights]:
    """Differentiate `mlp_rows` in BF16, its quantization as the identity; see `dispatch_rows.expert_rows_backward`."""
    into_gate_up, into_down = into or (None, None)
    grad_activation = input_grad(grad_rows, down, offsets)
    grad_hidden, weighted, grad_weight = swiglu_backward(hidden, grad_activation, row_weight, fmt.activation_kind)
    grad_down = weight_grad(grad_rows, weighted, offsets, into=into_down)
    grad_gate_up = weight_grad(grad_hidden, rows, offsets, into=into_gate_up)
    return input_grad(grad_hidden, gate_up, offsets), grad_weight, grad_gate_up, grad_down


def expert_mlp_backward(
    grad_out: Tensor,
    x: Tensor,
    hidden: Tensor,
    routed: RoutedRows,
    topk_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fmt: QuantFormat,
) -> tuple[Tensor, Tensor, Weights, Weights]:
    """Differentiate `expert_mlp_forward`, quantization counting as the identity.

    Args:
        grad_out: [T, H] BF16.
        x: [T, H] BF16.
        hidden: [T * k, 2 I] BF16, fc1's output.
        routed: rows of the T * k choices.
        topk_weight: [T, k] FP32.
        gate_up: [E, 2 I, H] BF16 for the input gradient.
        down: [E, H, I] BF16 for the input gradient.
        fmt: what the forward ran.

    Returns:
        gradients of x, topk_weight, gate_up and down.
    """
    top_k = topk_weight.shape[1]
    grad_x_rows, grad_weight, grad_gate_up, grad_down = mlp_rows_backward(
        spread_rows(grad_out.contiguous(), routed.inverse, top_k),
        spread_rows(x.contiguous(), routed.inverse, top_k),
        hidden,
        routed.offsets,
        topk_weight.reshape(-1)[routed.order],
        gate_up,
        down,
        fmt,
    )
    grad_x = combine_rows(grad_x_rows, routed.inverse, None, None, top_k=top_k)
    return grad_x, grad_weight[routed.inverse].view_as(topk_weight), grad_gate_up, grad_down
