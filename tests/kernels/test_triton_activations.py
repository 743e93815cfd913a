import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qarl_kernels import fp8
from qarl_kernels.ops.activations import quantize_group, quantize_token
from support.asserts import assert_bitwise_equal
from support.triton_interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SHAPES = [(5, 256), (3, 768), (2, 1152), (2, 2048)] if INTERPRETED else [(16384, 768), (16384, 2048), (4097, 14336)]
QUANTIZERS = {
    "token": (quantize_token, fp8.quantize_token),
    "group": (quantize_group, fp8.quantize_group),
    "group_after_swiglu": (
        lambda x: quantize_group(x, after_swiglu=True),
        lambda x: fp8.quantize_group(x, after_swiglu=True),
    ),
}


@pytest.fixture(params=QUANTIZERS)
def quantizers(request):
    return QUANTIZERS[request.param]


def heavy_tailed(rows, columns):
    """Rows and 128-wide groups of very different size, so that a scale of the wrong axis shows."""
    size = torch.exp2(torch.randint(-9, 9, (rows, 1)) + torch.randint(-3, 4, (rows, columns)).float())
    groups = torch.exp2(torch.randint(-4, 5, (rows, -(-columns // 128))).float()).repeat_interleave(128, -1)
    return torch.randn(rows, columns) * size * groups[:, :columns]


def assert_same_quantization(actual, expected):
    assert_bitwise_equal(actual[1], expected[1])
    assert_bitwise_equal(actual[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantizers_are_bit_equal_to_the_reference(quantizers, shape, dtype):
    operator, reference = quantizers
    x = heavy_tailed(*shape).to(DEVICE, dtype)
    assert_same_quantization(operator(x), reference(x))
    # The scale of the wrong axis: of one group for the token, of the token for every group.
    wrong = (
        fp8.quantize_group(x)[1].amin(-1, keepdim=True) if reference is fp8.quantize_token else fp8.quantize_token(x)[1]
    )
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(wrong.expand_as(reference(x)[1]), reference(x)[1])


def test_floors_zeros_denormals_and_the_largest_numbers(quantizers):
    operator, reference = quantizers
    largest = torch.finfo(torch.bfloat16).max
    sizes = [0.0, -0.0, 1e-40, 9e-41, 1e-38, 1e-12, 1e-10, 4e-8, 1.9e-3, 1.96e-3, 448.0, 1e30, largest]
    x = (torch.randn(len(sizes), 256).clamp(-3, 3) / 3 * torch.tensor(sizes)[:, None]).to(torch.bfloat16)
    x[-1, 7], x[-1, 200] = largest, -largest
    x = x.to(DEVICE)
    assert x.isfinite().all()
    assert_same_quantization(operator(x), reference(x))


def test_not_a_number_and_infinity_reach_the_scale(quantizers):
    operator, _ = quantizers
    x = torch.ones(3, 256, dtype=torch.bfloat16, device=DEVICE)
    x[0, 3], x[1, 130] = torch.nan, -torch.inf
    a8, scale = operator(x)
    assert scale[0, 0].isnan()
    assert a8[0, :128].float().isnan().all()
    assert scale[1, -1] == torch.inf
    assert a8[1, 130].float().isnan()
    assert (a8[1, 131:].float() == 0).all()
    assert (a8[2].float() == 448).all()


def test_divisions_round_correctly_for_every_pair_of_fractions():
    # 128 fractions of amax times every BF16 number below it, at several exponents of amax.
    exponents = [0] if INTERPRETED else [-100, -20, -9, 0, 1, 60]
    fractions = range(0, 128, 37) if INTERPRETED else range(128)
    amax = torch.tensor([(1 + f / 128) * 2.0**e for e in exponents for f in fractions])
    row = torch.arange(2048 if INTERPRETED else 32512, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(row.float() <= amax[:, None], row.float(), -amax[:, None]).to(DEVICE, torch.bfloat16)
    assert_same_quantization(quantize_token(x), fp8.quantize_token(x))


@pytest.mark.parametrize("columns", [1, 40, 200, 1023])
def test_tokens_may_have_any_width(columns):
    x = heavy_tailed(4, columns).to(DEVICE, torch.bfloat16)
    assert_same_quantization(quantize_token(x), fp8.quantize_token(x))


def test_no_rows_are_no_problem(quantizers):
    operator, reference = quantizers
    x = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    assert_same_quantization(operator(x), reference(x))


def test_errors_name_everything_wrong():
    with pytest.raises(ValueError, match=r"x is torch.float16 .*x is not contiguous"):
        quantize_token(torch.zeros(256, 4, device=DEVICE).half().T)
    with pytest.raises(ValueError, match=r"x has 100 columns \(legal: multiples of 128\)"):
        quantize_group(torch.zeros(4, 100, device=DEVICE))
    with pytest.raises(ValueError, match=r"x has 32769 columns"):
        quantize_token(torch.zeros(1, 32769, device=DEVICE))
    with pytest.raises(ValueError, match=r"kind='fp8_group' \(legal: fp8_token, int8_token\)"):
        quantize_token(torch.zeros(4, 128, device=DEVICE), "fp8_group")


def test_operators_are_registered_for_tracing():
    x = torch.randn(3, 256, dtype=torch.bfloat16, device=DEVICE)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.qarl.quantize_token, (x, "fp8_token", False, False), test_utils=checks)
    torch.library.opcheck(torch.ops.qarl.quantize_group, (x, True, False), test_utils=checks)
    with FakeTensorMode():
        x = torch.empty(7, 512, dtype=torch.bfloat16, device=DEVICE)
        assert [list(part.shape) for part in quantize_group(x)] == [[7, 512], [7, 4]]
        assert [list(part.shape) for part in quantize_token(x)] == [[7, 512], [7, 1]]
