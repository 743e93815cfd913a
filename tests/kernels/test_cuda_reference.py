"""CUDA runs the same arithmetic as the CPU reference: quantizers bit for bit, GEMMs up to the accumulation order."""

import pytest
import torch
from asserts import assert_bitwise_equal, assert_snr
from format_cases import uneven_weight

from qarl_kernels import GemmOperand, expert_mlp, gemm, grouped_gemm, quantize_weight
from qarl_kernels.fp8 import quantize_group, quantize_token

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
MIN_DB = 45


def extreme_weight():
    """Ordinary numbers beside an all-zero row, an all-zero group, denormals, negative zero, and +-max in one group."""
    weight = uneven_weight(2, 256, 384)
    weight[0, 3] = 0.0
    weight[1, :128, 128:256] = 0.0
    weight[0, 5, :128] = torch.arange(128) * 2.0**-133
    weight[0, 6, :128] = torch.arange(128) * 2.0**-128
    weight[0, 7, :64] = -0.0
    weight[1, 200, :2] = torch.tensor([1.0, -1.0]) * 2.0**100
    return weight


def activations(dtype):
    """Tokens of many sizes, one all zero, one under the scale's floor."""
    x = torch.randn(33, 384) * torch.exp2(torch.randint(-8, 8, (33, 1)).float())
    x[4] = 0.0
    x[5] *= 2.0**-30
    return x.to(dtype)


def move(operand):
    return GemmOperand(operand.format, operand.values.cuda(), None if operand.scale is None else operand.scale.cuda())


def test_weights_quantize_to_the_same_bits(fmt):
    weight = extreme_weight()
    on_cpu, on_cuda = quantize_weight(weight, fmt), quantize_weight(weight.cuda(), fmt)
    for suffix, expected in on_cpu.tensors.items():
        assert on_cuda.tensors[suffix].is_cuda
        assert_bitwise_equal(on_cuda.tensors[suffix].cpu(), expected)
    assert_bitwise_equal(on_cuda.dequantize().cpu(), on_cpu.dequantize())
    other = quantize_weight((weight * 1.25).cuda(), fmt)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(other.dequantize().cpu(), on_cpu.dequantize())


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_are_the_same_bits(fmt, dtype):
    weight = extreme_weight()
    on_cpu = GemmOperand.from_weight(quantize_weight(weight, fmt), dtype)
    on_cuda = GemmOperand.from_weight(quantize_weight(weight.cuda(), fmt), dtype)
    assert_bitwise_equal(on_cuda.values.cpu(), on_cpu.values)
    assert_bitwise_equal(on_cuda.effective_weight().cpu(), on_cpu.effective_weight())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [quantize_token, quantize_group, lambda x: quantize_group(x, after_swiglu=True)])
def test_activations_quantize_to_the_same_bits(quantize, dtype):
    x = activations(dtype)
    for on_cuda, expected in zip(quantize(x.cuda()), quantize(x), strict=True):
        assert_bitwise_equal(on_cuda.cpu(), expected)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(quantize((x * 1.25).cuda())[1].cpu(), quantize(x)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemms_agree(fmt, dtype):
    x = activations(dtype)
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(256, 384), fmt), dtype)
    expected = gemm(x, operand)
    assert_snr(gemm(x.cuda(), move(operand)).cpu(), expected, MIN_DB)
    # Rows differ in size by 2^16: the large ones must not hide the small.
    small = expected.float().abs().amax(-1) < 1
    assert_snr(gemm(x.cuda(), move(operand)).cpu()[small], expected[small], MIN_DB)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(gemm(x.cuda(), move(operand)).cpu().roll(1, -1), expected, MIN_DB)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemms_agree_with_empty_experts(fmt, dtype):
    x, offsets = torch.randn(33, 384).to(dtype), [0, 0, 20, 20, 33]
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(4, 130, 384), fmt), dtype)
    expected = grouped_gemm(x, operand, offsets)
    assert_snr(grouped_gemm(x.cuda(), move(operand), offsets).cpu(), expected, MIN_DB)
    assert grouped_gemm(x[:0].cuda(), move(operand), [0] * 5).shape == (0, 130)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(grouped_gemm(x.cuda(), move(operand), [0, 0, 19, 19, 33]).cpu(), expected, MIN_DB)


def run_mlp(x, index, router_weight, fc1, fc2):
    return expert_mlp(
        x,
        index,
        router_weight,
        lambda rows, offsets, dtype: grouped_gemm(rows, fc1, offsets, out_dtype=dtype),
        lambda rows, offsets, dtype: grouped_gemm(rows, fc2, offsets, out_dtype=dtype, after_swiglu=True),
        fc1.format,
        4,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_mlps_agree(fmt, dtype):
    x, router_weight = torch.randn(16, 256).to(dtype), torch.rand(16, 2)
    index = torch.stack([torch.tensor([0, 3] if token % 3 else [1, 0]) for token in range(16)])
    fc1 = GemmOperand.from_weight(quantize_weight(3 * uneven_weight(4, 256, 256), fmt), dtype)
    fc2 = GemmOperand.from_weight(quantize_weight(3 * uneven_weight(4, 256, 128), fmt), dtype)
    expected = run_mlp(x, index, router_weight, fc1, fc2)
    # A last bit of fc1 that falls the other way may move an FP8 code of fc2's input by one.
    min_db = MIN_DB if fmt.activation_kind == "none" else 40
    on_cuda = run_mlp(x.cuda(), index.cuda(), router_weight.cuda(), move(fc1), move(fc2)).cpu()
    assert_snr(on_cuda, expected, min_db)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(run_mlp(x, index.flip(-1), router_weight, fc1, fc2), expected, min_db)
