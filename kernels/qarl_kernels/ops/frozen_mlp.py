"""The backward of an expert MLP whose weights are frozen: gradients of tokens and router weights alone.

The formulas are those of `ops/mlp.py`; no gradient of a weight is computed.
"""

from torch import Tensor

from qarl_formats import QuantFormat
from qarl_kernels.ops.combine import combine_rows
from qarl_kernels.ops.operand_gemm import input_grad
from qarl_kernels.ops.routing import spread_rows
from qarl_kernels.ops.swiglu_backward import swiglu_backward
from qarl_kernels.routing import RoutedRows


def frozen_mlp_backward(
    grad_out: Tensor,
    hidden: Tensor,
    routed: RoutedRows,
    topk_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fmt: QuantFormat,
) -> tuple[Tensor, Tensor]:
    """Differentiate `expert_mlp_forward` by its inputs, quantization counting as the identity.

    Args:
        grad_out: [T, H] BF16.
        hidden: [T * k, 2 I] BF16, fc1's output.
        routed: rows of the T * k choices.
        topk_weight: [T, k] FP32.
        gate_up: [E, 2 I, H] BF16, what ran.
        down: [E, H, I] BF16, likewise.
        fmt: what the forward ran.

    Returns:
        Gradients of x [T, H] BF16 and of topk_weight [T, k] FP32.
    """
    top_k = topk_weight.shape[1]
    grad_rows = spread_rows(grad_out.contiguous(), routed.inverse, top_k)
    grad_activation = input_grad(grad_rows, down, routed.offsets)
    row_weight = topk_weight.reshape(-1)[routed.order]
    grad_hidden, _, grad_weight = swiglu_backward(hidden, grad_activation, row_weight, fmt.activation_kind)
    grad_x_rows = input_grad(grad_hidden, gate_up, routed.offsets)
    grad_x = combine_rows(grad_x_rows, routed.inverse, None, None, top_k=top_k)
    return grad_x, grad_weight[routed.inverse].view_as(topk_weight)
