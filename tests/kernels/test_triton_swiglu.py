import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qarl_kernels import fp8, get_format
from qarl_kernels.expert_mlp import swiglu as reference_swiglu
from qarl_kernels.ops.swiglu import swiglu, swiglu_quantize_group, swiglu_quantize_token
from support.asserts import assert_bitwise_equal
from support.triton_interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# M rows, I columns.
SHAPES = [(5, 128), (9, 768), (2, 1152)] if INTERPRETED else [(16384, 768), (4097, 2048), (1025, 9728)]


def hidden_rows(rows, inner):
    """Gates of both signs up to saturation on either side, tiny ones too, and ups of another size."""
    gate = torch.randn(rows, inner) * torch.exp2(torch.randint(-12, 6, (rows, inner)).float())
    gate.view(-1)[:8] = torch.tensor([0.0, -0.0, 1e-39, -1e-39, 87.0, -87.5, -88.5, -3e38])
    up = torch.randn(rows, inner) * torch.exp2(torch.randint(-6, 4, (rows, 1)).float())
    return torch.cat([gate, up], -1).to(DEVICE, torch.bfloat16)


def exp(x):
    """The exponential of FP32 that the kernel has on this device."""
    return torch.from_numpy(np.exp(x.numpy())) if INTERPRETED else torch.exp(x)


def rounded_swiglu(hidden):
    gate, up = hidden.chunk(2, -1)
    return (gate.float() / (1 + exp(-gate.float()))).bfloat16() * up


def assert_nearly_bitwise_equal(actual, expected):
    """Where exp differs in its last bit: at most one element in a thousand, and by one unit in the last place."""
    assert actual.dtype == expected.dtype
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    # With sign and magnitude the bits of neighbours differ by one, but for 0 and -0.
    distance = (actual.view(bits).long() - expected.view(bits).long()).abs()
    assert distance.max() <= 1, f"{int((distance > 1).sum())} elements are more than one unit in the last place off"
    assert distance.double().mean() <= 1e-3, f"{int(distance.sum())} of {distance.numel()} elements differ"


def swap(hidden):
    gate, up = hidden.chunk(2, -1)
    return torch.cat([up, gate], -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_rounds_after_each_factor(shape):
    hidden = hidden_rows(*shape)
    actual = swiglu(hidden)
    assert_bitwise_equal(actual, rounded_swiglu(hidden))
    assert_nearly_bitwise_equal(actual, reference_swiglu(hidden, get_format("w4a16")))
    gate, up = hidden.chunk(2, -1)
    wrong = {
        "swapped": reference_swiglu(swap(hidden), get_format("w4a16")),
        "sigmoid": gate.sigmoid() * up,
        "rounded once": (F.silu(gate.float()) * up.float()).bfloat16(),
    }
    for values in wrong.values():
        with pytest.raises(AssertionError, match="elements"):
            assert_nearly_bitwise_equal(actual, values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_token_quantization_is_that_of_the_rounded_swiglu(shape):
    hidden = hidden_rows(*shape)
    a8, scale = swiglu_quantize_token(hidden)
    for expected in (fp8.quantize_token(swiglu(hidden)), fp8.quantize_token(rounded_swiglu(hidden))):
        assert_bitwise_equal(scale, expected[1])
        assert_bitwise_equal(a8, expected[0])
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(a8, fp8.quantize_token(swiglu(swap(hidden)))[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_group_quantization_leaves_the_product_unrounded(shape):
    hidden = hidden_rows(*shape)
    a8, scale = swiglu_quantize_group(hidden)
    gate, up = hidden.float().chunk(2, -1)
    expected = fp8.quantize_group(gate * (1 / (1 + exp(-gate))) * up, after_swiglu=True)
    assert_bitwise_equal(scale, expected[1])
    assert_bitwise_equal(a8, expected[0])
    reference = fp8.quantize_group(reference_swiglu(hidden, get_format("fp8_block")), after_swiglu=True)
    assert_nearly_bitwise_equal(a8, reference[0])
    torch.testing.assert_close(scale, reference[1], rtol=1e-6, atol=0)
    with pytest.raises(AssertionError, match="elements"):
        assert_nearly_bitwise_equal(a8, fp8.quantize_group(swiglu(hidden), after_swiglu=True)[0])


def test_small_products_take_the_floor_of_the_fused_quantizers():
    hidden = hidden_rows(3, 256) * 1e-6
    assert (swiglu_quantize_token(hidden)[1] == 1 / (448 * 512)).all()
    assert (swiglu_quantize_group(hidden)[1] == 1 / (448 * 512)).all()


def test_no_rows_and_odd_widths():
    empty = torch.empty(0, 512, dtype=torch.bfloat16, device=DEVICE)
    assert swiglu(empty).shape == (0, 256)
    assert [list(part.shape) for part in swiglu_quantize_token(empty)] == [[0, 256], [0, 1]]
    assert [list(part.shape) for part in swiglu_quantize_group(empty)] == [[0, 256], [0, 2]]
    hidden = hidden_rows(3, 77)
    assert_bitwise_equal(swiglu(hidden), rounded_swiglu(hidden))
    assert_bitwise_equal(swiglu_quantize_token(hidden)[0], fp8.quantize_token(swiglu(hidden))[0])


def test_errors_name_everything_wrong():
    with pytest.raises(ValueError, match=r"hidden is torch.float32 .*; hidden has 5 columns"):
        swiglu(torch.zeros(2, 5, device=DEVICE))
    with pytest.raises(ValueError, match=r"hidden has 128 columns \(legal: multiples of 256\)"):
        swiglu_quantize_group(torch.zeros(2, 128, device=DEVICE, dtype=torch.bfloat16))


def test_operators_are_registered_for_tracing():
    hidden = hidden_rows(3, 128)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.qarl
    torch.library.opcheck(ops.swiglu, (hidden,), test_utils=checks)
    torch.library.opcheck(ops.quantize_token, (hidden, "fp8_token", False, True), test_utils=checks)
    torch.library.opcheck(ops.quantize_group, (hidden, True, True), test_utils=checks)
    with FakeTensorMode():
        hidden = torch.empty(7, 512, dtype=torch.bfloat16, device=DEVICE)
        assert [list(part.shape) for part in swiglu_quantize_group(hidden)] == [[7, 256], [7, 2]]
