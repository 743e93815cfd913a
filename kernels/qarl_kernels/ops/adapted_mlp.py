"""The expert MLP on the kernels with frozen weights and low-rank adapters, forward and backward.

Forward as in `ops/mlp.py`, with d1 = (x A1^T) B1^T added to fc1's output and w (a A2^T) B2^T to the weighted row.
Backward, with g the output's gradient copied to rows and no gradient of a frozen weight:

    da = g W2 + (g B2) A2,  dw = da . a_q,  [dg, du] = SwiGLU'(c1, w da)
    dB2 = g^T (w a A2^T),  dA2 = (g B2)^T (w a),  dB1 = dc1^T (x A1^T),  dA1 = (dc1 B1)^T x
    dx = dc1 W1 + (dc1 B1) A1

so neither t nor fc2's output is stored. Formats that quantize activations take dw of the adapter's part from a_q, too.
The rank-r products run in the grouped GEMMs of the base; a rank that is no multiple of 8 is filled up with zeros.
"""

from torch import Tensor, nn

from qarl_formats import QuantFormat
from qarl_kernels.gemm import GemmOperand
from qarl_kernels.low_rank import ExpertAdapters, LowRank
from qarl_kernels.ops.combine import combine_rows
from qarl_kernels.ops.grouped_gemm import grouped_gemm_bf16
from qarl_kernels.ops.mlp import spread_tokens, sum_choices
from qarl_kernels.ops.operand_gemm import input_grad, multiply_rows, quantize_rows
from qarl_kernels.ops.routing import spread_rows
from qarl_kernels.ops.swiglu import swiglu
from qarl_kernels.ops.swiglu_backward import swiglu_backward
from qarl_kernels.ops.wgrad import grouped_wgrad
from qarl_kernels.routing import RoutedRows

_RANK_MULTIPLE = 8


def adapted_mlp_forward(
    x: Tensor, routed: RoutedRows, topk_weight: Tensor, fc1: GemmOperand, fc2: GemmOperand, adapters: ExpertAdapters
) -> tuple[Tensor, Tensor]:
    """Run routed tokens through their adapted experts and sum.

    Args:
        x: [T, H] BF16.
        routed: rows of the T * k choices.
        topk_weight: [T, k] FP32.
        fc1: [E, 2 I, H], gate rows before up rows.
        fc2: [E, H, I].
        adapters: BF16 factors.

    Returns:
        [T, H] BF16; the input of SwiGLU [T * k, 2 I] BF16, which the backward needs.
    """
    fmt, offsets = fc1.format, routed.offsets
    rows = spread_tokens(x, routed, topk_weight, fmt)
    plain_rows = rows.values
    if rows.scale is not None:
        plain_rows = spread_rows(x.contiguous(), routed.inverse, topk_weight.shape[1])
    hidden = multiply_rows(rows, fc1, offsets)
    for half, factors in zip(hidden.chunk(2, -1), (adapters.gate, adapters.up), strict=True):
        half += _low_rank(plain_rows, factors, offsets)
    row_weight = None if fmt.router_weight == "weighted_sum" else topk_weight.reshape(-1)[routed.order]
    # With adapters the engine rounds the activation before it quantizes it, also where it fuses the two without.
    activation = swiglu(hidden)
    out_rows = multiply_rows(quantize_rows(activation, fmt), fc2, offsets, row_weight=row_weight)
    out_rows += _low_rank(activation, adapters.down, offsets, row_weight)
    return sum_choices(out_rows, routed, topk_weight, fmt), hidden


def adapted_mlp_backward(
    grad_out: Tensor,
    x: Tensor,
    hidden: Tensor,
    routed: RoutedRows,
    topk_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    fmt: QuantFormat,
    adapters: ExpertAdapters | None,
) -> tuple[Tensor, ...]:
    """Differentiate `adapted_mlp_forward`, or `expert_mlp_forward` with frozen weights.

    Args:
        grad_out: [T, H] BF16.
        x: [T, H] BF16.
        hidden: [T * k, 2 I] BF16, the input of SwiGLU.
        routed: rows of the T * k choices.
        topk_weight: [T, k] FP32.
        gate_up: [E, 2 I, H] BF16, what ran.
        down: [E, H, I] BF16, likewise.
        fmt: what the forward ran.
        adapters: BF16 factors; None without adapters.

    Returns:
        gradients of x, of topk_weight and, in their order, of the adapters' factors (`ExpertAdapters.flat`).
    """
    top_k, offsets = topk_weight.shape[1], routed.offsets
    grad_rows = spread_rows(grad_out.contiguous(), routed.inverse, top_k)
    grad_activation = input_grad(grad_rows, down, offsets)
    if adapters is not None:
        grad_activation += _input_grad(grad_rows, adapters.down, offsets)
    row_weight = topk_weight.reshape(-1)[routed.order]
    grad_hidden, weighted, grad_weight = swiglu_backward(hidden, grad_activation, row_weight, fmt.activation_kind)
    grad_x_rows = input_grad(grad_hidden, gate_up, offsets)
    grads: tuple[Tensor, ...] = ()
    if adapters is not None:
        rows = spread_rows(x.contiguous(), routed.inverse, top_k)
        for half, factors in zip(grad_hidden.chunk(2, -1), (adapters.gate, adapters.up), strict=True):
            grad = half.contiguous()
            grad_x_rows += _input_grad(grad, factors, offsets)
            grads += _factor_grads(grad, rows, factors, offsets)
        grads += _factor_grads(grad_rows, weighted, adapters.down, offsets)
    grad_x = combine_rows(grad_x_rows, routed.inverse, None, None, top_k=top_k)
    return grad_x, grad_weight[routed.inverse].view_as(topk_weight), *grads


def _low_rank(rows: Tensor, factors: LowRank, offsets: Tensor, row_weight: Tensor | None = None) -> Tensor:
    a, b = _filled(factors)
    inner = grouped_gemm_bf16(rows, a, offsets)
    rounding = None if row_weight is None else "on_accumulator"
    return grouped_gemm_bf16(inner, b, offsets, row_weight=row_weight, weight_rounding=rounding)


def _input_grad(grad: Tensor, factors: LowRank, offsets: Tensor) -> Tensor:
    a, b = _filled(factors)
    return input_grad(input_grad(grad, b, offsets), a, offsets)


def _factor_grads(grad: Tensor, rows: Tensor, factors: LowRank, offsets: Tensor) -> tuple[Tensor, Tensor]:
    a, b = _filled(factors)
    grad_a = grouped_wgrad(input_grad(grad, b, offsets), rows, offsets)
    grad_b = grouped_wgrad(grad, grouped_gemm_bf16(rows, a, offsets), offsets)
    assert isinstance(grad_a, Tensor)
    assert isinstance(grad_b, Tensor)
    rank = factors[0].shape[-2]
    return grad_a[:, :rank], grad_b[:, :, :rank]


def _filled(factors: LowRank) -> LowRank:
    a, b = factors
    lacking = -a.shape[-2] % _RANK_MULTIPLE
    if not lacking:
        return a.contiguous(), b.contiguous()
    return nn.functional.pad(a, (0, 0, 0, lacking)), nn.functional.pad(b, (0, lacking))
