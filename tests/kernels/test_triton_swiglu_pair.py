"""SwiGLU of two tensors: the experts' rounding points, torch's bits on a GPU, and gradients against float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qarl_kernels.dispatch_norms import swiglu_pair, swiglu_pair_backward
from qarl_kernels.ops.swiglu import swiglu
from qarl_kernels.ops.swiglu_pair import swiglu_pair_backward_kernel, swiglu_pair_kernel
from support.asserts import assert_bitwise_equal, assert_snr
from support.triton_interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Less than one program; whole programs; several and a rest; a real MLP.
SHAPES = [(3, 77), (4, 1024), (9, 1000)] + ([] if INTERPRETED else [(4096, 4864)])


def make_case(rows, inner):
    """Gates of both signs up to saturation on either side, tiny ones too, and ups of another size."""
    gate = torch.randn(rows, inner) * torch.exp2(torch.randint(-12, 6, (rows, inner)).float())
    gate.view(-1)[:8] = torch.tensor([0.0, -0.0, 1e-39, -1e-39, 87.0, -87.5, -88.5, -3e38])
    up = torch.randn(rows, inner) * torch.exp2(torch.randint(-6, 4, (rows, 1)).float())
    return [tensor.to(DEVICE, torch.bfloat16) for tensor in (torch.randn(rows, inner), gate, up)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_rounds_as_the_experts_and_torch_do(shape):
    _, gate, up = make_case(*shape)
    found = swiglu_pair_kernel(gate, up)
    assert_bitwise_equal(found, swiglu(torch.cat([gate, up], -1)))
    if not INTERPRETED:
        assert_bitwise_equal(found, F.silu(gate) * up)
    for wrong in ((F.silu(gate.float()) * up.float()).bfloat16(), swiglu_pair_kernel(up, gate)):
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(found, wrong)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_autograds(shape):
    grad, gate, up = make_case(*shape)
    wide_gate, wide_up = (tensor.double().requires_grad_() for tensor in (gate, up))
    expected = torch.autograd.grad(F.silu(wide_gate) * wide_up, (wide_gate, wide_up), grad.double())
    references = swiglu_pair_backward(*(tensor.float() for tensor in (grad, gate, up)))
    for mine, reference, wanted in zip(swiglu_pair_backward_kernel(grad, gate, up), references, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_snr(mine, wanted, 50)
        assert_snr(reference, wanted, 100)
        for wrong in (wanted.roll(1, 1), 1.01 * wanted):
            with pytest.raises(AssertionError, match="SNR"):
                assert_snr(mine, wrong, 50)


def test_the_references_forward_is_transformers_own():
    _, gate, up = make_case(5, 64)
    assert_bitwise_equal(swiglu_pair(gate.cpu(), up.cpu()), F.silu(gate.cpu()) * up.cpu())


def test_what_it_cannot_take_is_listed():
    gate = torch.ones(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"gate is torch\.float32") as error:
        swiglu_pair_backward_kernel(gate.bfloat16().mT, gate, gate.bfloat16()[:1])
    assert "up has shape [1, 8] (legal: [2, 8])" in str(error.value)
    assert "grad is not contiguous" in str(error.value)


def test_no_rows_and_tracing():
    grad, gate, up = make_case(3, 70)
    assert swiglu_pair_kernel(gate[:0], up[:0]).shape == (0, 70)
    assert [part.shape for part in swiglu_pair_backward_kernel(grad[:0], gate[:0], up[:0])] == [(0, 70)] * 2
    assert swiglu_pair_kernel(gate[None], up[None]).shape == (1, 3, 70)
    with FakeTensorMode():
        fake = torch.empty(2, 7, 64, dtype=torch.bfloat16, device=DEVICE)
        assert [part.shape for part in swiglu_pair_backward_kernel(fake, fake, swiglu_pair_kernel(fake, fake))] == [
            fake.shape
        ] * 2
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.qarl.swiglu_pair, (gate, up), test_utils=checks)
    torch.library.opcheck(torch.ops.qarl.swiglu_pair_backward, (grad, gate, up), test_utils=checks)
