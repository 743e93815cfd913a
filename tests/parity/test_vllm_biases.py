"""Biases of dense layers against vLLM 0.25.1's CUTLASS kernels, which add them before they round."""

import pytest
import torch

from support.asserts import assert_bitwise_equal

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

import vllm._custom_ops as ops  # noqa: E402

from qarl_kernels import gemm_operand, get_format, grouped_gemm, one_group, quantize_weight  # noqa: E402
from qarl_kernels.gemm import GemmOperand  # noqa: E402
from qarl_kernels.gemm import grouped_gemm as reference_grouped_gemm  # noqa: E402
from support.vllm.compare import case, equal_fraction, tokens  # noqa: E402


def dense_layer(x, stored, bias):
    """A dense layer of `int8` or `fp8_channel` as vLLM's linear kernels run it."""
    if stored.format.name == "int8":
        rows, scale = ops.scaled_int8_quant(x)[:2]
    else:
        rows, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    weight, channels = stored.tensors["weight"].t(), stored.tensors["weight_scale"]
    return ops.cutlass_scaled_mm(rows, weight, scale_a=scale, scale_b=channels, out_dtype=torch.bfloat16, bias=bias)


def problem(name, columns):
    """Rows, a stored weight and a bias whose product leaves nothing to the order of a sum."""
    x = tokens()
    if name == "fp8_channel":
        # One product a sum, which is exact in every kernel.
        x = x * (torch.arange(x.shape[1], device="cuda") == 7)
    weight = case("int8_triton").masters[0][0][:columns].contiguous()
    bias = torch.randn(columns, device="cuda").to(torch.bfloat16)
    return x, quantize_weight(weight, get_format(name)), bias


# 1008 is no multiple of 128, which our specialised FP8 kernel does not take.
@pytest.mark.parametrize("columns", [1024, 1008])
@pytest.mark.parametrize("origin", ["kernels", "reference"])
@pytest.mark.parametrize("name", ["int8", "fp8_channel"])
def test_a_bias_is_added_before_the_rounding(name, origin, columns):
    x, stored, bias = problem(name, columns)
    if origin == "kernels":
        operand, multiply = gemm_operand(stored, torch.bfloat16), grouped_gemm
    else:
        operand, multiply = GemmOperand.from_weight(stored, torch.bfloat16), reference_grouped_gemm
    theirs = dense_layer(x, stored, bias)
    assert_bitwise_equal(multiply(x, operand.stacked(), one_group(x), bias=bias), theirs)
    rounded_first = multiply(x, operand.stacked(), one_group(x)) + bias
    print(f"FIGURE {name}_{columns}_rounded_first_equal_fraction {equal_fraction(rounded_first, theirs):.6g}")
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(rounded_first, theirs)


def test_up_to_64_rows_of_fp8_are_scaled_in_the_other_order():
    """There CUTLASS swaps its operands, and with them the scales; the learner keeps the order of larger batches."""
    x, stored, bias = problem("fp8_channel", 1024)
    # The order shows in one element of two thousand.
    few = torch.cat([dense_layer(part, stored, bias) for part in x.split(64)])
    rows, token_scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    weight, channels = stored.tensors["weight"].float(), stored.tensors["weight_scale"].mT
    product = (token_scale * (rows.float() @ weight.mT)).double()
    assert_bitwise_equal(few, (channels.double() * product + bias.double()).float().to(torch.bfloat16))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(few, dense_layer(x, stored, bias))
