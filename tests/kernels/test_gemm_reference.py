from dataclasses import replace

import pytest
import torch

from qarl_kernels import (
    GemmOperand,
    QuantizedWeight,
    fp8,
    gemm,
    get_format,
    grouped_gemm,
    grouped_input_grad,
    int8,
    one_group,
    quantize_weight,
)
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import FORMATS, quantized_activations, uneven_weight

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.float32, torch.bfloat16]
# Only the accumulation order differs from float64: FP32 keeps 24 bits; rounding the result to BF16 costs 2^-9.
MIN_DB = {torch.float32: 110, torch.bfloat16: 45}
M, N, K = 9, 256, 256


def expected_product(x, weight, fmt):
    return quantized_activations(x, fmt) @ weight.double().mT


def swapped_scale_axis(stored):
    """The weight as it would be if the scale were laid out along the other axis."""
    scale, kind = stored.tensors.get("weight_scale", stored.tensors.get("weight_scale_inv")), stored.format.weight_kind
    if kind.endswith("_rows"):
        return stored.tensors["weight"].float() * scale.mT
    suffix = "weight_scale_inv" if kind == "fp8_blocks" else "weight_scale"
    swapped = scale.mT.reshape(scale.shape).contiguous()
    return QuantizedWeight(stored.format, stored.shape, stored.tensors | {suffix: swapped}).dequantize()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_is_the_product_of_quantized_activations_and_the_effective_weight(fmt, dtype):
    x = (torch.randn(M, K) * torch.exp2(torch.randint(-3, 4, (M, 1)).float())).to(dtype)
    stored = quantize_weight(uneven_weight(N, K), fmt)
    operand = GemmOperand.from_weight(stored, dtype)
    result = gemm(x, operand)
    assert result.dtype == dtype
    assert_snr(result, expected_product(x, operand.effective_weight(), fmt), MIN_DB[dtype])
    assert_snr(gemm(x, operand, out_dtype=torch.float32), expected_product(x, operand.effective_weight(), fmt), 110)
    if fmt.activation_kind != "none":
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(result, x.double() @ operand.effective_weight().double().mT, MIN_DB[dtype])
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(result, expected_product(x, operand.effective_weight().mT, fmt), MIN_DB[dtype])


def test_a_block_of_fp8_is_scaled_by_its_tokens_group_before_its_weights_block():
    # One column a token, so that the sum is one product of two E4M3 numbers, which is exact.
    x = torch.diag(torch.rand(128) + 0.5)
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(256, 128), FORMATS["fp8_block"]), torch.float32)
    codes, token = fp8.quantize_group(x)
    sums, block = codes.float().diag()[:, None] * operand.values.T, operand.scale.repeat_interleave(128, 0).T
    # A code of -0 alone gives -0, and within a sum 0.
    assert torch.equal(gemm(x, operand), sums * token * block)
    for other in (sums * block * token, sums * (token * block)):
        assert not torch.equal(gemm(x, operand), other)


@pytest.mark.parametrize("key", [key for key, fmt in FORMATS.items() if fmt.is_quantized])
def test_a_swapped_scale_axis_is_noticed(key):
    fmt, x = FORMATS[key], torch.randn(M, K)
    weight = uneven_weight(N, K).float() * torch.tensor([1.0, 4.0]).repeat_interleave(128)
    stored = quantize_weight(weight, fmt)
    result = gemm(x, GemmOperand.from_weight(stored, torch.float32))
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(result, expected_product(x, swapped_scale_axis(stored), fmt), MIN_DB[torch.bfloat16])


@pytest.mark.parametrize("key", [key for key, fmt in FORMATS.items() if fmt.weight_kind == "int"])
def test_a_wrong_zero_point_is_noticed(key):
    fmt, x = FORMATS[key], torch.randn(M, K)
    stored = quantize_weight(uneven_weight(N, K), fmt)
    scale = stored.tensors["weight_scale"].float().repeat_interleave(fmt.group_size, -1)
    result = gemm(x, GemmOperand.from_weight(stored, torch.float32))
    # int4 re-encoded as FP8 keeps three fraction bits of the weight.
    right, wrong = stored.codes() * scale, (stored.codes() + 1) * scale
    assert_snr(result, expected_product(x, right, fmt), 28 if fmt.name == "w4a8" else MIN_DB[torch.bfloat16])
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(result, expected_product(x, wrong, fmt), 28)


def test_the_effective_weight_is_the_stored_one(fmt):
    stored = quantize_weight(uneven_weight(N, K), fmt)
    operand = GemmOperand.from_weight(stored, torch.bfloat16)
    if fmt.name != "w4a8":
        assert_bitwise_equal(operand.effective_weight().to(torch.bfloat16), stored.dequantize())
        return
    # w4a8 multiplies fp8(code * s8): close to the stored weight, and not it.
    assert_snr(operand.effective_weight(), stored.dequantize(), 28)
    assert not torch.equal(operand.effective_weight().to(torch.bfloat16), stored.dequantize())


def test_the_result_is_rounded_once(fmt):
    # Activations of -1, 0 and 1 and weights of at most 7 bits make every sum exact in FP32, whatever the order.
    x = torch.randint(-1, 2, (64, K)).to(torch.bfloat16)
    weight = torch.randint(-64, 65, (N, K)) / 16
    operand = GemmOperand.from_weight(quantize_weight(weight, fmt), torch.bfloat16)
    unrounded = gemm(x, operand, out_dtype=torch.float32)
    assert unrounded.dtype == torch.float32
    assert not torch.equal(unrounded, unrounded.to(torch.bfloat16).float())
    assert_bitwise_equal(gemm(x, operand), unrounded.to(torch.bfloat16))
    twice = sum(gemm(x[:, half], part).float() for half, part in _halves(operand)).to(torch.bfloat16)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(twice, unrounded.to(torch.bfloat16))


def _halves(operand):
    for half in (slice(0, K // 2), slice(K // 2, K)):
        scale = operand.scale
        if operand.format.weight_kind == "fp8_blocks":
            scale = scale[:, half.start // 128 : half.stop // 128]
        yield half, replace(operand, values=operand.values[:, half], scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_points_by_hand(dtype):
    # 1 + 127 * 2^-8 = 1.49609375 in FP32; in BF16 (steps of 2^-7) 191.5 steps, a tie: 192 = 1.5. Accumulated in BF16,
    # every 2^-8 after the 1 would be lost.
    weight = torch.full((1, 128), 2.0**-8)
    weight[0, 0] = 1.0
    operand = GemmOperand.from_weight(quantize_weight(weight, get_format("bf16")), dtype)
    ones = torch.ones(1, 128, dtype=dtype)
    assert gemm(ones, operand).item() == (1.5 if dtype == torch.bfloat16 else 1.49609375)
    assert gemm(ones, operand, out_dtype=torch.float32).item() == 1.49609375
    assert gemm(ones, operand, out_dtype=torch.bfloat16).item() == 1.5


# Format -> the columns of x and of the weight that are not zero, and their product.
BY_HAND = {
    # x: amax 2, scale 1/224: 2 -> 448, 0.3 -> 67.2 -> 64 (steps of 8: 8.4 -> 8); x8 = [2, 2/7].
    # The channel: amax 1, scale 1/448: 1 -> 448, 0.5 -> 224. Sum 2 * 1 + 2/7 * 0.5 = 15/7.
    "fp8_channel": ({0: 2.0, 1: 0.3}, {0: 1.0, 1: 0.5}, 15 / 7),
    # x: amax 2: 2 -> 127, 0.3 -> 19.05 -> 19, so x8 = [2, 38/127]. The channel: amax 1: 127, and 0.5 -> 63.5, a tie:
    # 64. Sum 2 * 1 + 38/127 * 64/127.
    "int8": ({0: 2.0, 1: 0.3}, {0: 1.0, 1: 0.5}, 2 + 38 * 64 / 127**2),
    # Two K-blocks, each with its own activation group and weight block: (2 * 1) + (0.5 * 3); 0.3 beside the 0.5 is
    # 268.8 of its group's scale 0.5 / 448, steps of 32: 8.4 -> 8 -> 256 * 0.5 / 448 = 2/7, times 3.
    "fp8_block": ({0: 2.0, 128: 0.5, 129: 0.3}, {0: 1.0, 128: 3.0, 129: 3.0}, 2 + 1.5 + 6 / 7),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_scales_of_activations_and_weights_by_hand(name):
    *rows, expected = BY_HAND[name]
    x, weight = (torch.tensor([[row.get(column, 0.0) for column in range(256)]]) for row in rows)
    operand = GemmOperand.from_weight(quantize_weight(weight, get_format(name)), torch.float32)
    assert gemm(x, operand).item() == pytest.approx(expected, rel=1e-6)


# Format -> x, a row of the weight, the bias and y; all scales are 1 but int8's second token scale.
BIASES_BY_HAND = {
    # 256 + 1 + 1/2 is 258 (steps of 2); 257 rounded first is a tie that goes to 256, where 1/2 is lost.
    "fp8_channel": ([448.0, 256.0, 1.0], [0.0, 1.0, 1.0, 448.0], 0.5, 258.0),
    "int8": ([127.0, 1.0], [2.0, 3.0, 127.0], 0.5, 258.0),
    # The token scale is rn(1/127) = 2^-7 (1 + 2^-7 + 2^-14 + 2^-21), times 127 it is 1 - 2^-28: the product is fused.
    "int8 fused": ([1.0], [1.0, 127.0], -1.0, -(2.0**-28)),
    "bf16": ([256.0, 1.0], [1.0, 1.0], 0.5, 258.0),
}


@pytest.mark.parametrize("name", BIASES_BY_HAND)
def test_a_fused_bias_by_hand(name):
    *rows, bias, expected = BIASES_BY_HAND[name]
    x, weight = (torch.tensor([row + [0.0] * (128 - len(row))]).bfloat16() for row in rows)
    operand = GemmOperand.from_weight(quantize_weight(weight, get_format(name.split()[0])), torch.bfloat16)
    bias = torch.tensor([bias]).bfloat16()
    assert gemm(x, operand, bias=bias).item() == expected
    assert (gemm(x, operand) + bias).item() != expected


def test_a_bias_is_added_where_the_engine_adds_it(fmt):
    x, bias = torch.randn(64, K).bfloat16(), torch.randn(N).bfloat16()
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(N, K), fmt), torch.bfloat16)
    result = grouped_gemm(x, operand.stacked(), one_group(x), bias=bias)
    rounded_first = gemm(x, operand) + bias
    if fmt.name in ("int8", "fp8_channel", "bf16"):
        assert_bitwise_equal(result, gemm(x, operand, bias=bias))
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(rounded_first, result)
    else:
        assert_bitwise_equal(result, rounded_first)
        with pytest.raises(AssertionError, match="fuses no such bias"):
            gemm(x, operand, bias=bias)


def test_int8_activations_are_rounded_as_the_layers_own_kernel_rounds_them():
    # amax 127, so that 0.5 is a tie: to even in a dense layer, away from zero in an expert.
    operand = GemmOperand.from_weight(quantize_weight(torch.eye(128), get_format("int8")), torch.float32)
    x = torch.full((1, 128), 0.5)
    x[0, 0] = 127.0
    stack = GemmOperand(operand.format, operand.values[None], operand.scale[None])
    assert gemm(x, operand)[0, :2].tolist() == pytest.approx([127, 0])
    assert gemm(x, stack.expert(0))[0, :2].tolist() == pytest.approx([127, 1])
    assert grouped_gemm(x, operand.stacked(), one_group(x))[0, :2].tolist() == pytest.approx([127, 0])


def test_int8_experts_multiply_token_scales_first_and_dense_layers_channel_scales():
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(64, 128), get_format("int8")), torch.float32)
    stack = GemmOperand(operand.format, operand.values[None], operand.scale[None])
    # No ties, which the two kinds of layers round differently.
    codes = torch.randint(-126, 127, (9, 128)).float()
    codes[:, 0] = 127.0
    sums, channel = codes @ operand.values.mT, operand.scale.mT
    _, token = int8.quantize_token(codes * 0.7, dense=True)
    dense, routed = token * (channel * sums), channel * (token * sums)
    assert not torch.equal(dense, routed)
    assert_bitwise_equal(gemm(codes * 0.7, operand), dense)
    assert_bitwise_equal(gemm(codes * 0.7, stack.expert(0)), routed)


def test_the_floor_after_swiglu_by_hand():
    # 1e-4 / 448 is under the fused kernel's floor 1 / 229376: 22.94 -> 22 (steps of 2), so 128 * 22 / 229376.
    operand = GemmOperand.from_weight(quantize_weight(torch.ones(1, 128), get_format("fp8_block")), torch.float32)
    x = torch.full((1, 128), 1e-4)
    assert gemm(x, operand).item() == pytest.approx(128e-4, rel=1e-6)
    assert gemm(x, operand, after_swiglu=True).item() == pytest.approx(128 * 22 / 229376, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", [[0, 0, 3, 3, 9], [0, 9, 9, 9, 9], [0, 2, 4, 6, 9], [0, 0, 0, 0, 0]])
def test_grouped_gemm_is_each_experts_gemm(fmt, dtype, offsets):
    x = torch.randn(offsets[-1], K).to(dtype)
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(4, 130, K), fmt), dtype)
    result = grouped_gemm(x, operand, torch.tensor(offsets))
    assert (result.shape, result.dtype) == ((offsets[-1], 130), dtype)
    for expert in range(4):
        rows = slice(offsets[expert], offsets[expert + 1])
        assert_bitwise_equal(result[rows], gemm(x[rows], operand.expert(expert)))
        if rows.stop > rows.start:
            with pytest.raises(AssertionError, match="differ"):
                assert_bitwise_equal(result[rows], gemm(x[rows], operand.expert(expert - 1)))


@pytest.mark.parametrize("offsets", [[2, 3, 5], [0, 3, 4]])
def test_rows_of_no_expert_are_noticed(offsets):
    weight, offsets = torch.ones(2, 8, 128).bfloat16(), torch.tensor(offsets)
    operand = GemmOperand.from_weight(quantize_weight(weight, get_format("bf16")), torch.bfloat16)
    for call in (
        lambda: grouped_gemm(torch.ones(5, 128).bfloat16(), operand, offsets),
        lambda: grouped_input_grad(torch.ones(5, 8).bfloat16(), weight, offsets),
    ):
        with pytest.raises(AssertionError, match=f"5 rows, but the experts have {offsets[0]} to {offsets[-1]}"):
            call()


def test_grouped_gemm_passes_its_options_on(fmt):
    x = torch.full((4, 128), 1e-4, dtype=torch.bfloat16)
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(2, 128, 128), fmt), torch.bfloat16)
    options = {"out_dtype": torch.float32, "after_swiglu": True}
    result = grouped_gemm(x, operand, torch.tensor([0, 1, 4]), **options)
    assert_bitwise_equal(result[:1], gemm(x[:1], operand.expert(0), **options))
    assert_bitwise_equal(result[1:], gemm(x[1:], operand.expert(1), **options))


def test_a_dense_weight_is_a_stack_of_one(fmt):
    x = torch.randn(5, K).bfloat16()
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(N, K), fmt), torch.bfloat16)
    assert_bitwise_equal(grouped_gemm(x, operand.stacked(), one_group(x)), gemm(x, operand))


def test_one_row(fmt):
    operand = GemmOperand.from_weight(quantize_weight(uneven_weight(1, 128), fmt), torch.bfloat16)
    x = torch.randn(1, 128).bfloat16()
    assert_snr(gemm(x, operand), expected_product(x, operand.effective_weight(), fmt), MIN_DB[torch.bfloat16])
