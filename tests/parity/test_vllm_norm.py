"""Our RMSNorm beside vLLM's two kernels: the same bits."""

import pytest
import torch

from qarl_kernels import rms_norm
from support.asserts import assert_bitwise_equal

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

import vllm._custom_ops as ops  # noqa: E402

EPS = 1e-6


def inputs(rows, columns):
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device="cuda") * torch.exp2(torch.randint(-3, 4, (rows, 1), device="cuda").float())
    return x.to(torch.bfloat16), (1 + 0.3 * torch.randn(columns, device="cuda")).to(torch.bfloat16)


@pytest.mark.parametrize(("rows", "columns"), [(100, 512), (5000, 512), (300, 2048), (5000, 2048), (60000, 128)])
def test_a_norm_alone(rows, columns):
    x, weight = inputs(rows, columns)
    expected = torch.empty_like(x)
    ops.rms_norm(expected, x, weight, EPS)
    assert_bitwise_equal(rms_norm(x, weight, EPS, after_add=False), expected)


@pytest.mark.parametrize(("rows", "columns"), [(100, 512), (5000, 512), (300, 2048), (5000, 2048), (200, 4096)])
def test_a_norm_that_adds_the_residual(rows, columns):
    x, weight = inputs(rows, columns)
    residual = x.flip(0).contiguous()
    stream, out = residual.clone(), x.clone()
    ops.fused_add_rms_norm(out, stream, weight, EPS)
    assert_bitwise_equal(stream, x + residual)
    assert_bitwise_equal(rms_norm(stream, weight, EPS, after_add=True), out)


def test_torchs_norm_is_another(record_property):
    x, weight = inputs(60000, 512)
    expected = torch.empty_like(x)
    ops.rms_norm(expected, x, weight, EPS)
    theirs = torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)
    record_property("fraction", float((theirs != expected).double().mean()))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(theirs, expected)
