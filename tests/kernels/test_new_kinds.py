"""A kind of weights or activations that a reader does not know is an error there, never taken for another kind."""

from dataclasses import replace

import pytest
import torch

from qarl_kernels import (
    GemmOperand,
    QuantizedWeight,
    expert_rows_backward,
    gemm,
    get_format,
    quantize_weight,
    stored_layout,
)
from qarl_kernels.ops.weights import operand_from_weight, quantize_weight_kernel
from qarl_kernels.weights import unfit_values, weight_problems
from support.formats import uneven_weight
from support.triton_interpreter import DEVICE

SHAPE = (128, 128)
KNOWN = get_format("fp8_channel")


def stored(fmt) -> QuantizedWeight:
    """A stored weight whose record says `fmt`."""
    return QuantizedWeight(fmt, SHAPE, quantize_weight(uneven_weight(*SHAPE), KNOWN).tensors)


def operand(fmt) -> GemmOperand:
    return replace(GemmOperand.from_weight(stored(KNOWN), torch.bfloat16), format=fmt)


def backward(fmt):
    """The gradients of four rows through one expert of 128 intermediate channels."""
    rows, offsets = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([0, 4], dtype=torch.int32)
    weights = torch.ones(1, 256, 128, dtype=torch.bfloat16), torch.ones(1, 128, 128, dtype=torch.bfloat16)
    hidden = torch.ones(4, 256, dtype=torch.bfloat16)
    return expert_rows_backward(rows, rows, hidden, offsets, torch.ones(4), *weights, fmt)


OF_WEIGHTS = {
    "layout": lambda fmt: stored_layout(SHAPE, fmt),
    "problems": lambda fmt: weight_problems(SHAPE, fmt),
    "unfit": lambda fmt: unfit_values(uneven_weight(*SHAPE), fmt, "weight"),
    "quantizer": lambda fmt: quantize_weight(uneven_weight(*SHAPE), fmt),
    "quantizer_kernel": lambda fmt: quantize_weight_kernel(uneven_weight(*SHAPE).to(DEVICE), fmt),
    "dequantize": lambda fmt: stored(fmt).dequantize(),
    "operand": lambda fmt: GemmOperand.from_weight(stored(fmt), torch.bfloat16),
    "kernels_operand": lambda fmt: operand_from_weight(stored(fmt)),
    "order_of_scales": lambda fmt: operand(fmt).channel_first,
}
OF_ACTIVATIONS = {
    "gemm": lambda fmt: gemm(torch.ones(4, 128, dtype=torch.bfloat16), operand(fmt)),
    "backward": backward,
}


@pytest.mark.parametrize("reader", OF_WEIGHTS)
def test_a_new_kind_of_weights_is_refused_by(reader):
    OF_WEIGHTS[reader](KNOWN)
    with pytest.raises((AssertionError, NotImplementedError), match="fp6"):
        OF_WEIGHTS[reader](replace(KNOWN, weight_kind="fp6_rows"))


@pytest.mark.parametrize("reader", OF_ACTIVATIONS)
def test_a_new_kind_of_activations_is_refused_by(reader):
    OF_ACTIVATIONS[reader](KNOWN)
    with pytest.raises(AssertionError, match="fp6"):
        OF_ACTIVATIONS[reader](replace(KNOWN, activation_kind="fp6_token"))
