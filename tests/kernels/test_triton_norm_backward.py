"""RMSNorm's gradients against float64."""

import pytest
import torch

from qarl_kernels.ops.norm_backward import rms_norm_backward_kernel
from support.asserts import assert_bitwise_equal, assert_snr
from support.triton_interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Fewer rows than a program takes; several rounds of each program; columns that are no power of two.
SHAPES = [(5, 128), (300, 128), (33, 1280), (9, 2048)] + ([] if INTERPRETED else [(70001, 128), (8192, 2048)])


def make_case(rows, columns):
    x, grad = (torch.randn(rows, columns).to(DEVICE, torch.bfloat16) for _ in range(2))
    return grad, x, (1 + 0.3 * torch.randn(columns)).to(DEVICE, torch.bfloat16)


def by_autograd(grad, x, weight, eps):
    x, weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return torch.autograd.grad(out, (x, weight), grad.double())


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_autograds(shape):
    grad, x, weight = make_case(*shape)
    expected = by_autograd(grad, x, weight, 1e-6)
    found = rms_norm_backward_kernel(grad, x, weight, 1e-6)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_snr(mine, wanted, 50)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(found[0], grad.double() * weight.double() / x.double().square().mean(-1, keepdim=True).sqrt(), 50)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(found[1], (grad.double() * x.double()).sum(0), 50)


def test_eps_counts():
    grad, x, weight = make_case(4, 128)
    expected, _ = by_autograd(grad, x, weight, 0.5)
    assert_snr(rms_norm_backward_kernel(grad, x, weight, 0.5)[0], expected, 50)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(rms_norm_backward_kernel(grad, x, weight, 0.0)[0], expected, 50)


def test_the_same_sums_every_time():
    case = make_case(300, 256)
    for once, again in zip(*(rms_norm_backward_kernel(*case, 1e-6) for _ in range(2)), strict=True):
        assert_bitwise_equal(once, again)


def test_what_it_cannot_take_is_listed():
    x, grad = torch.ones(2, 16384, device=DEVICE, dtype=torch.bfloat16), torch.ones(3, 16384, device=DEVICE)
    with pytest.raises(ValueError, match=r"grad_out is torch\.float32") as error:
        rms_norm_backward_kernel(grad, x, x.new_ones(8), 1e-6)
    assert "grad_out has shape [3, 16384] (legal: [2, 16384])" in str(error.value)
    assert "weight has shape [8] (legal: [16384])" in str(error.value)
    assert "x has 16384 columns (legal: up to 8192)" in str(error.value)


def test_no_rows():
    empty = torch.empty(0, 128, dtype=torch.bfloat16, device=DEVICE)
    grad_x, grad_weight = rms_norm_backward_kernel(empty, empty, empty.new_ones(128), 1e-6)
    assert grad_x.shape == (0, 128)
    assert not grad_weight.any()


def test_the_registered_operator_has_a_faithful_fake():
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(
        torch.ops.qarl.rms_norm_backward.default, (*make_case(5, 128), 1e-6), test_utils=tests
    )
    assert set(found.values()) == {"SUCCESS"}
