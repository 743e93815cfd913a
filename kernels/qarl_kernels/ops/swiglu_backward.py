"""The expert MLP's backward between its two GEMMs, in one pass over memory.

With s = sigmoid(gate), a = silu(gate) * up, w the row's router weight and da = dY W2 the gradient of fc2's input for
the output row before its weight:

    d gate = w da up s (1 + gate (1 - s)),   d up = w da gate s,   dw = sum da a_q

and w a, which fc2's weight gradient needs.
a_q is what fc2 multiplied: `a` after the format's activation quantization. da . a_q is then the gradient of the router
weight as the forward used it, and fc2's output need not be kept. One program holds a row, so a row has at most 16384
columns.
"""

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_formats import FP8_BLOCK, ActivationKind
from qarl_kernels.ops.activations import MAX_COLUMNS, row_tiles
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import divide, exp, largest_magnitude, silu, silu_by_sigmoid
from qarl_kernels.ops.token_rounding import TOKEN_DTYPES, floored_scale, token_scale, token_values

ACTIVATION_KINDS = get_args(ActivationKind)


@triton.jit
def _rounded_fp8(values, scale):
    return divide(values, scale).to(tl.float8e4nv).to(tl.float32) * scale


@triton.jit
def _swiglu_backward_kernel(
    hidden_ptr,  # [M, 2 I]
    grad_ptr,  # [M, I]
    weight_ptr,  # [M]
    grad_hidden_ptr,  # [M, 2 I]
    weighted_ptr,  # [M, I]
    grad_weight_ptr,  # [M]
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    largest = tl.zeros([TILE], tl.float32)
    partial = tl.zeros([TILE], tl.float32)
    activations = ()
    grads = ()
    for tile in tl.static_range(TILES):
        column = tile * TILE + tl.arange(0, TILE)
        mask = column < INNER
        wide = row * (2 * INNER) + column
        gate = tl.load(hidden_ptr + wide, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + wide + INNER, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * INNER + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + exp(-gate))
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        weighted_grad = weight * grad
        tl.store(grad_hidden_ptr + wide, (weighted_grad * up * slope).to(tl.bfloat16), mask=mask)
        tl.store(grad_hidden_ptr + wide + INNER, (weighted_grad * gate * sigmoid).to(tl.bfloat16), mask=mask)
        if KIND == "fp8_group":
            activation = silu_by_sigmoid(gate) * up
        else:
            activation = (silu(gate).to(tl.bfloat16).to(tl.float32) * up).to(tl.bfloat16).to(tl.float32)
        tl.store(weighted_ptr + row * INNER + column, (weight * activation).to(tl.bfloat16), mask=mask)
        if PER_TOKEN:
            largest = tl.maximum(largest, tl.abs(activation), propagate_nan=tl.PropagateNan.ALL)
            activations = activations + (activation,)  # noqa: RUF005
            grads = grads + (grad,)  # noqa: RUF005
        elif KIND == "fp8_group":
            groups = tl.reshape(activation, [TILE // GROUP, GROUP])
            scale = floored_scale(largest_magnitude(groups, 1), False)
            partial += grad * tl.reshape(_rounded_fp8(groups, scale[:, None]), [TILE])
        else:
            partial += grad * activation
    if PER_TOKEN:
        scale, factor = token_scale(largest_magnitude(largest, 0), KIND, False)
        for tile in tl.static_range(TILES):
            partial += grads[tile] * (token_values(activations[tile], factor, KIND, False).to(tl.float32) * scale)
    tl.store(grad_weight_ptr + row, tl.sum(partial, axis=0))


def swiglu_backward(
    hidden: Tensor, grad: Tensor, row_weight: Tensor, activation_kind: ActivationKind
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate w * fc2(quantize(silu(gate) * up)) between the two GEMMs; formulas in the module's docstring.

    Args:
        hidden: [M, 2 I] BF16, contiguous, fc1's output, gate columns before up columns.
        grad: [M, I] BF16, contiguous, dY W2 for the unweighted output row.
        row_weight: [M] FP32, router weight of each row.
        activation_kind: how fc2's input was quantized; `fp8_group` needs I a multiple of 128.

    Returns:
        grad_hidden: [M, 2 I] BF16; w * a: [M, I] BF16; grad_row_weight: [M] FP32.

    Raises:
        ValueError: a shape, dtype, device or kind is not supported.
    """
    problems = tensor_problems("hidden", hidden, (torch.bfloat16,)) + tensor_problems("grad", grad, (torch.bfloat16,))
    problems += tensor_problems("row_weight", row_weight, (torch.float32,), num_dims=1)
    if activation_kind not in ACTIVATION_KINDS:
        problems.append(f"activation_kind={activation_kind!r} (legal: {', '.join(ACTIVATION_KINDS)})")
    if not problems:
        rows, inner = grad.shape
        if hidden.shape != (rows, 2 * inner) or row_weight.shape != (rows,):
            shapes = f"hidden {list(hidden.shape)}, row_weight {list(row_weight.shape)}"
            problems.append(f"{shapes} (legal for grad {list(grad.shape)}: {[rows, 2 * inner]}, {[rows]})")
        unit = FP8_BLOCK if activation_kind == "fp8_group" else 1
        if inner % unit or not 1 <= inner <= MAX_COLUMNS // 2:
            problems.append(f"grad has {inner} columns (legal: multiples of {unit} up to {MAX_COLUMNS // 2})")
    refuse("swiglu_backward", problems)
    return _swiglu_backward(hidden, grad, row_weight, activation_kind)


@torch.library.custom_op("qarl::expert_swiglu_backward", mutates_args=())
def _swiglu_backward(
    hidden: Tensor, grad: Tensor, row_weight: Tensor, activation_kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _swiglu_backward_fake(hidden, grad, row_weight, activation_kind)
    rows, inner = grad.shape
    if rows:
        tile, tiles, num_warps = row_tiles(inner)
        per_token = activation_kind in TOKEN_DTYPES
        _swiglu_backward_kernel[(rows,)](
            hidden, grad, row_weight, *outputs, inner, tile, tiles, FP8_BLOCK, activation_kind, per_token,
            num_warps=num_warps,
        )  # fmt: skip
    return outputs


@_swiglu_backward.register_fake
def _swiglu_backward_fake(hidden: Tensor, grad: Tensor, row_weight: Tensor, _: str) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(grad), torch.empty_like(row_weight)
