import pytest
import torch

from qarl_kernels import int8
from qarl_kernels.fp8 import quantize_group, quantize_token
from qarl_kernels.ops.swiglu_backward import swiglu_backward
from support.asserts import assert_snr
from support.triton_interpreter import DEVICE, INTERPRETED

SHAPES = [(3, 128), (5, 384)] if INTERPRETED else [(3, 128), (257, 768), (4096, 768), (64, 1536)]
KINDS = ["none", "fp8_token", "fp8_group", "int8_token"]
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def make_case(rows, inner):
    hidden = (2 * torch.randn(rows, 2 * inner)).bfloat16()
    return hidden, torch.randn(rows, inner).bfloat16(), torch.rand(rows) + 0.1


def executed(activation, kind):
    """What fc2 multiplies, in float64."""
    if kind == "none":
        return activation.double()
    if kind == "fp8_token":
        values, scale = quantize_token(activation)
        return values.double() * scale.double()
    if kind == "int8_token":
        values, scale = int8.quantize_token(activation, dense=False)
        return values.double() * scale.double()
    values, scale = quantize_group(activation, after_swiglu=True)
    return values.double() * scale.double().repeat_interleave(128, -1)


def by_autograd(hidden, grad, weight, kind):
    """float64 autograd of sum(da * w * silu(gate) * up), and the forward's activation in the engine's rounding."""
    leaf = hidden.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up * weight.double()[:, None] * grad.double()).sum().backward()
    gate, up = hidden.chunk(2, -1)
    if kind == "fp8_group":
        activation = torch.nn.functional.silu(gate.float()) * up.float()
    else:
        activation = torch.nn.functional.silu(gate) * up
    weighted = weight.double()[:, None] * activation.double()
    return leaf.grad, weighted, (grad.double() * executed(activation, kind)).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_autograds_gradient(kind, shape):
    hidden, grad, weight = make_case(*shape)
    expected = by_autograd(hidden, grad, weight, kind)
    actual = swiglu_backward(hidden.to(DEVICE), grad.to(DEVICE), weight.to(DEVICE), kind)
    for value, reference in zip(actual, expected, strict=True):
        assert_snr(value, reference, 45)
    swapped = swiglu_backward(hidden.roll(shape[1], -1).to(DEVICE), grad.to(DEVICE), weight.to(DEVICE), kind)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(swapped[0], expected[0], 45)


@pytest.mark.parametrize(
    ("kind", "mistaken"),
    [("fp8_token", "none"), ("fp8_group", "none"), ("none", "fp8_token"), ("int8_token", "fp8_token")],
)
def test_the_router_weights_gradient_sees_what_fc2_multiplied(kind, mistaken):
    hidden, grad, weight = make_case(8, 256)
    expected = by_autograd(hidden, grad, weight, kind)[2]
    actual = swiglu_backward(hidden.to(DEVICE), grad.to(DEVICE), weight.to(DEVICE), mistaken)[2]
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(actual, expected, 45)


def test_no_rows():
    hidden, grad, weight = (tensor[:0].to(DEVICE) for tensor in make_case(1, 128))
    assert [list(out.shape) for out in swiglu_backward(hidden, grad, weight, "none")] == [[0, 256], [0, 128], [0]]


def test_every_problem_is_named():
    hidden, grad, weight = (tensor.to(DEVICE) for tensor in make_case(2, 96))
    with pytest.raises(ValueError, match=r"grad has 96 columns \(legal: multiples of 128") as error:
        swiglu_backward(hidden[:, :-2].contiguous(), grad, weight, "fp8_group")
    assert "hidden [2, 190], row_weight [2] (legal for grad [2, 96]: [2, 192], [2])" in str(error.value)
    with pytest.raises(ValueError, match="activation_kind='int4'") as error:
        swiglu_backward(hidden.float(), grad, weight, "int4")
    assert "hidden is torch.float32" in str(error.value)
