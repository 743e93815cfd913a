"""The INT8 kernels: activations, weights and the grouped GEMM, each against the reference in torch."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from qarl_kernels import int8
from qarl_kernels.ops.activations import quantize_token
from qarl_kernels.ops.eight_bit_weights import MAX_COLUMNS, dequantize_8_bits, quantize_8_bits
from qarl_kernels.ops.grouped_gemm import grouped_gemm_channel
from qarl_kernels.ops.swiglu import swiglu, swiglu_quantize_token
from support.asserts import assert_bitwise_equal
from support.formats import uneven_weight
from support.groups import offsets_of
from support.triton_interpreter import DEVICE, INTERPRETED
from support.weights import LAYOUTS, WEIGHTS, significand_pairs

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ROWS = [(5, 256), (3, 1152)] if INTERPRETED else [(16384, 768), (16384, 2048), (4097, 14336)]
# Experts' row counts, N, K: empty experts first, last and between, partial tiles, edge columns.
CASES = [([0, 5, 0, 70, 33, 0], 72, 144)] if INTERPRETED else [([0, 5, 0, 700, 333, 0], 1536, 2048), ([1], 2048, 768)]
int8_channel_quantize = partial(quantize_8_bits, kind="int8_rows")
KINDS = pytest.mark.parametrize("dense", [True, False])


def rows_of(rows, columns, dtype=torch.bfloat16):
    size = torch.exp2(torch.randint(-9, 9, (rows, 1)) + torch.randint(-3, 4, (rows, columns)).float())
    return (torch.randn(rows, columns) * size).to(DEVICE, dtype)


def assert_same_quantization(actual, expected, *, dense):
    """Bit for bit but for the experts' on a GPU, where Triton's divisions are two units in the last place off."""
    if dense or INTERPRETED:
        assert_bitwise_equal(actual[1], expected[1])
        assert_bitwise_equal(actual[0], expected[0])
        return
    torch.testing.assert_close(actual[1], expected[1], rtol=2**-22, atol=0)
    distance = (actual[0].int() - expected[0].int()).abs()
    assert distance.max() <= 1, f"{int((distance > 1).sum())} codes differ by more than one"
    assert distance.double().mean() <= 1e-3, f"{int(distance.sum())} of {distance.numel()} codes differ"


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_tokens_are_quantized_as_the_reference(shape, dtype, dense):
    x = rows_of(*shape, dtype)
    actual = quantize_token(x, "int8_token", dense=dense)
    assert_same_quantization(actual, int8.quantize_token(x, dense=dense), dense=dense)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_quantization(actual, int8.quantize_token(x.flip(0), dense=dense), dense=dense)


@KINDS
def test_ties_floors_zeros_and_the_largest_numbers(dense):
    largest = torch.finfo(torch.bfloat16).max
    sizes = [0.0, -0.0, 1e-30, 1e-12, 1e-10, 127.0, 254.0, 1e30, largest]
    x = torch.arange(-256, 256)[None] / 256 * torch.tensor(sizes)[:, None]
    x = x.to(DEVICE, torch.bfloat16)
    actual = quantize_token(x, "int8_token", dense=dense)
    assert_same_quantization(actual, int8.quantize_token(x, dense=dense), dense=dense)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_quantization(actual, int8.quantize_token(x, dense=not dense), dense=True)


@KINDS
def test_not_a_number_and_infinity_reach_the_scale(dense):
    x = torch.ones(3, 256, dtype=torch.bfloat16, device=DEVICE)
    x[0, 3], x[1, 130] = torch.nan, -torch.inf
    codes, scale = quantize_token(x, "int8_token", dense=dense)
    assert scale[0].isnan()
    assert scale[1] == torch.inf
    assert (codes[2] == 127).all()


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_fused_quantization_is_that_of_the_rounded_swiglu(shape):
    hidden = rows_of(shape[0], 2 * shape[1])
    actual = swiglu_quantize_token(hidden, "int8_token")
    assert_same_quantization(actual, int8.quantize_token(swiglu(hidden), dense=False), dense=False)
    swapped = hidden.roll(shape[1], 1)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_quantization(actual, int8.quantize_token(swiglu(swapped), dense=False), dense=False)


def assert_is_the_references(quantized, weight):
    w8, scale, nonfinite = quantized
    expected_w8, expected_scale = int8.quantize_channel(weight)
    assert_bitwise_equal(scale, expected_scale)
    assert_bitwise_equal(w8, expected_w8)
    assert nonfinite.tolist() == [0]
    assert_bitwise_equal(dequantize_8_bits(w8, scale), (w8.float() * scale).bfloat16())


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize(
    "shape", [(1, 384), (3, 7, 264), (2, 18944)] if INTERPRETED else [(7, 1531, 2048), (300, 28672)], ids=str
)
def test_weights_are_quantized_as_the_reference(make, shape):
    weight = make(*shape[:-1], -(-shape[-1] // 32) * 32)[..., : shape[-1]].contiguous().to(DEVICE)
    assert_is_the_references(int8_channel_quantize(weight), weight)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_experts_may_lie_anywhere(layout):
    weight = uneven_weight(4, 3, 256).to(DEVICE)
    assert_is_the_references(int8_channel_quantize(layout(weight)), weight)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_is_the_references(int8_channel_quantize(layout(weight)), weight.flip(0))


# 2^-120: the scale is subnormal. From 2^-8 of the maximum on all quotients round to zero.
@pytest.mark.parametrize("exponent", [-120, 0] if INTERPRETED else [-120, 0, 127])
def test_all_pairs_of_significands(exponent):
    pairs = significand_pairs(4096, octaves=10)[:: 32 if INTERPRETED else 1]
    weight = (pairs.float() * 2.0**exponent).bfloat16().to(DEVICE)
    assert_is_the_references(int8_channel_quantize(weight), weight)


def test_rows_that_are_not_finite_are_counted():
    weight = uneven_weight(3, 2, 256).to(DEVICE)
    weight[1, 0, 130:133] = torch.nan
    weight[2, :, 255] = -torch.inf
    assert int8_channel_quantize(weight)[2].tolist() == [3]


def problem(counts, n, k):
    x, weight = rows_of(sum(counts), k), uneven_weight(len(counts), n, -(-k // 32) * 32)[..., :k].to(DEVICE)
    rows, stored = int8.quantize_token(x, dense=False), int8.quantize_channel(weight)
    return rows, stored, offsets_of(counts)


def reference(rows, stored, offsets, row_weight=None, *, channel_first, bias=None):
    (a8, a_scale), (w8, w_scale) = rows, stored
    sums = torch.cat(
        [
            int8.exact_product(a8[start:stop].float(), w8[expert].float())
            for expert, (start, stop) in enumerate(pairwise(offsets.tolist()))
        ]
    )
    experts = torch.repeat_interleave(torch.arange(len(w8), device=DEVICE), offsets.diff())
    column_scale = w_scale[experts, :, 0]
    if bias is not None:
        return (a_scale.double() * (column_scale * sums).double() + bias.double()).float().bfloat16()
    acc = a_scale * (column_scale * sums) if channel_first else column_scale * (a_scale * sums)
    return (acc if row_weight is None else acc * row_weight[:, None]).bfloat16()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("weighted", "channel_first"), [(True, False), (False, True)])
def test_the_product_is_bit_equal(case, weighted, channel_first):
    rows, stored, offsets = problem(*case)
    row_weight = torch.rand(len(rows[0]), device=DEVICE) + 0.01 if weighted else None
    options = {"row_weight": row_weight, "channel_first": channel_first}
    actual = grouped_gemm_channel(*rows, *stored, offsets, **options)
    assert_bitwise_equal(actual, reference(rows, stored, offsets, row_weight, channel_first=channel_first))
    wrong = stored[0], stored[1].flatten().roll(1).view_as(stored[1])
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(actual, reference(rows, wrong, offsets, row_weight, channel_first=channel_first))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bias_is_added_before_the_one_rounding(case):
    rows, stored, offsets = problem(*case)
    bias = torch.randn(case[1], device=DEVICE).bfloat16()
    plain, actual = (
        grouped_gemm_channel(*rows, *stored, offsets, channel_first=True, bias=one) for one in (None, bias)
    )
    assert_bitwise_equal(actual, reference(rows, stored, offsets, channel_first=True, bias=bias))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(actual, plain + bias)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(actual, reference(rows, stored, offsets, channel_first=True, bias=bias.roll(1)))


def test_a_bias_is_added_to_the_unrounded_product():
    # 127 * rn(1/127) is 1 - 2^-28, which rounded to FP32 would be 1.
    codes = torch.zeros(16, 32, dtype=torch.int8, device=DEVICE)
    codes[:, 0] = 127
    ones = torch.ones(16, 1, device=DEVICE)
    operands = codes, ones / 127, codes.clamp(max=1)[None], ones[None]
    bias = -torch.ones(16, device=DEVICE).bfloat16()
    product = grouped_gemm_channel(*operands, offsets_of([16]), channel_first=True, bias=bias)
    assert_bitwise_equal(product, torch.full_like(product, -(2.0**-28)))


def test_the_scales_are_multiplied_in_the_order_that_is_told():
    # Only rows where BF16 shows it: one result in a hundred thousand.
    (a8, a_scale), stored, offsets = problem([8192], 64, 32)
    orders = [reference((a8, a_scale), stored, offsets, None, channel_first=first) for first in (True, False)]
    shows = (orders[0] != orders[1]).any(-1).nonzero().flatten()
    assert len(shows)
    offsets = offsets_of([len(shows)])
    for channel_first, expected in zip((True, False), orders, strict=True):
        actual = grouped_gemm_channel(a8[shows], a_scale[shows], *stored, offsets, channel_first=channel_first)
        assert_bitwise_equal(actual, expected[shows])


def test_no_rows():
    (a8, a_scale), stored, offsets = problem([0, 0, 0], 64, 128)
    assert grouped_gemm_channel(a8, a_scale, *stored, offsets).shape == (0, 64)


def test_errors_name_everything_wrong():
    rows, stored, offsets = problem([4, 0], 64, 144)
    wrong = [one[..., :136].contiguous() for one in (rows[0], stored[0])]
    with pytest.raises(ValueError, match=r"K=136 \(legal: multiples of 16\).*a_scale has shape \[4\]"):
        grouped_gemm_channel(wrong[0], rows[1].flatten(), wrong[1], stored[1], offsets)
    with pytest.raises(ValueError, match=r"bias has shape \[63\] \(legal: \[64\]\); bias without channel_first"):
        grouped_gemm_channel(*rows, *stored, offsets, bias=torch.zeros(63, device=DEVICE).bfloat16())
    with pytest.raises(ValueError, match=rf"K={MAX_COLUMNS + 8} \(legal: at most {MAX_COLUMNS}\)"):
        int8_channel_quantize(torch.zeros(1, MAX_COLUMNS + 8, device=DEVICE).bfloat16())
    with pytest.raises(ValueError, match=r"w8 is torch.int16 .*legal: one of torch.float8_e4m3fn, torch.int8"):
        dequantize_8_bits(stored[0].to(torch.int16), stored[1])


def test_operators_are_registered_for_tracing():
    rows, stored, offsets = problem([2, 1], 64, 144)
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.qarl
    torch.library.opcheck(ops.quantize_8_bits, ([uneven_weight(2, 3, 256).to(DEVICE)], "int8_rows"), test_utils=checks)
    torch.library.opcheck(ops.grouped_gemm_channel, (*rows, *stored, offsets, None, None, False), test_utils=checks)
    x = rows_of(3, 256)
    # The other check multiplies codes by a number, which torch cannot keep in int8.
    torch.library.opcheck(ops.quantize_token, (x, "int8_token", True, False), test_utils="test_faketensor")
    torch.library.opcheck(ops.quantize_token, (x, "int8_token", False, True), test_utils="test_faketensor")
