"""A GPU computes what the CPU reference computes: quantizers bit for bit, GEMMs up to the accumulation order.

In BF16 on a Hopper GPU these are the Triton operators, in FP32 the reference itself on CUDA.
"""

import pytest
import torch

from qarl_kernels import expert_mlp, gemm_operand, grouped_gemm, int8, one_group, quantize_weight, require_finite
from qarl_kernels.fp8 import quantize_group, quantize_token
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import uneven_weight

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
MIN_DB = 45


def extreme_weight(fmt):
    """Ordinary numbers beside an all-zero row, an all-zero group, denormals, negative zero, and +-max in one group."""
    weight = uneven_weight(2, 256, 384)
    weight[0, 3] = 0.0
    weight[1, :128, 128:256] = 0.0
    weight[0, 5, :128] = torch.arange(128) * 2.0**-133
    weight[0, 6, :128] = torch.arange(128) * 2.0**-128
    weight[0, 7, :64] = -0.0
    largest = 2.0**19 if fmt.tensor_scaled else 2.0**100
    weight[1, 200, :2] = torch.tensor([1.0, -1.0]) * largest
    return weight


def activations(dtype):
    """Tokens of many sizes, one all zero, one under the scale's floor."""
    x = torch.randn(33, 384) * torch.exp2(torch.randint(-8, 8, (33, 1)).float())
    x[4] = 0.0
    x[5] *= 2.0**-30
    return x.to(dtype)


def operands(weight, fmt, dtype):
    """The same weight quantized and prepared on the CPU and on the GPU."""
    return tuple(gemm_operand(quantize_weight(copy, fmt), dtype) for copy in (weight, weight.cuda()))


def test_weights_quantize_to_the_same_bits(fmt):
    weight = extreme_weight(fmt)
    on_cpu, on_cuda = quantize_weight(weight, fmt), quantize_weight(weight.cuda(), fmt)
    for suffix, expected in on_cpu.tensors.items():
        assert on_cuda.tensors[suffix].is_cuda
        assert_bitwise_equal(on_cuda.tensors[suffix].cpu(), expected)
    assert_bitwise_equal(on_cuda.dequantize().cpu(), on_cpu.dequantize())
    other = quantize_weight((weight * 1.25).cuda(), fmt)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(other.dequantize().cpu(), on_cpu.dequantize())


def test_the_kernels_count_what_is_not_finite(fmt):
    weight = uneven_weight(3, 128, 128).cuda()
    weight[2, 5, 100] = torch.nan
    weight[1, 127, 3] = torch.inf
    good = quantize_weight(uneven_weight(128, 128).cuda(), fmt)
    with pytest.raises(ValueError, match="NaN or Inf") as error:
        require_finite({"good_proj": good, "down_proj": quantize_weight(weight, fmt, name="down_proj")})
    assert "down_proj" in str(error.value)
    assert "good_proj" not in str(error.value)
    # Integer codes times their scale may be infinite from 2^127 on, NVFP4's global scale from 2^20; FP8 holds all.
    large = quantize_weight(uneven_weight(128, 128).fill_(2.0**127).cuda(), fmt)
    if fmt.weight_kind in ("int", "nvfp4"):
        with pytest.raises(ValueError, match="large_proj"):
            require_finite({"large_proj": large})
    else:
        require_finite({"large_proj": large})


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_are_the_same_bits(fmt, dtype):
    on_cpu, on_cuda = operands(extreme_weight(fmt), fmt, dtype)
    assert_bitwise_equal(on_cuda.values.float().cpu(), on_cpu.values.float())
    assert_bitwise_equal(on_cuda.effective_weight().cpu(), on_cpu.effective_weight())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "quantize",
    [
        quantize_token,
        quantize_group,
        lambda x: quantize_group(x, after_swiglu=True),
        lambda x: int8.quantize_token(x, dense=True),
        lambda x: int8.quantize_token(x, dense=False),
    ],
)
def test_activations_quantize_to_the_same_bits(quantize, dtype):
    x = activations(dtype)
    for on_cuda, expected in zip(quantize(x.cuda()), quantize(x), strict=True):
        assert_bitwise_equal(on_cuda.cpu(), expected)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(quantize((x * 1.25).cuda())[1].cpu(), quantize(x)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemms_agree(fmt, dtype):
    x = activations(dtype)
    on_cpu, on_cuda = operands(uneven_weight(256, 384), fmt, dtype)
    expected = grouped_gemm(x, on_cpu.stacked(), one_group(x))
    actual = grouped_gemm(x.cuda(), on_cuda.stacked(), one_group(x.cuda())).cpu()
    assert_snr(actual, expected, MIN_DB)
    # Rows differ in size by 2^16: the large ones must not hide the small.
    small = expected.float().abs().amax(-1) < 1
    assert_snr(actual[small], expected[small], MIN_DB)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(actual.roll(1, -1), expected, MIN_DB)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemms_agree_with_empty_experts(fmt, dtype):
    x, offsets = torch.randn(33, 384).to(dtype), torch.tensor([0, 0, 20, 20, 33], dtype=torch.int32)
    on_cpu, on_cuda = operands(uneven_weight(4, 144, 384), fmt, dtype)
    expected = grouped_gemm(x, on_cpu, offsets)
    assert_snr(grouped_gemm(x.cuda(), on_cuda, offsets.cuda()).cpu(), expected, MIN_DB)
    assert grouped_gemm(x[:0].cuda(), on_cuda, torch.zeros_like(offsets).cuda()).shape == (0, 144)
    wrong = torch.tensor([0, 0, 19, 19, 33], dtype=torch.int32)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(grouped_gemm(x.cuda(), on_cuda, wrong.cuda()).cpu(), expected, MIN_DB)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_mlps_agree(fmt, dtype):
    x, router_weight = torch.randn(16, 256).to(dtype), torch.rand(16, 2)
    index = torch.stack([torch.tensor([0, 3] if token % 3 else [1, 0]) for token in range(16)])
    fc1 = operands(3 * uneven_weight(4, 256, 256), fmt, dtype)
    fc2 = operands(3 * uneven_weight(4, 256, 128), fmt, dtype)
    expected = expert_mlp(x, index, router_weight, fc1[0], fc2[0])
    # A last bit of fc1 that falls the other way may move an FP8 code of fc2's input by one.
    min_db = MIN_DB if fmt.activation_kind == "none" else 40
    assert_snr(expert_mlp(x.cuda(), index.cuda(), router_weight.cuda(), fc1[1], fc2[1]).cpu(), expected, min_db)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(expert_mlp(x, index.flip(-1), router_weight, fc1[0], fc2[0]), expected, min_db)
