import math
from dataclasses import replace

import pytest
import torch

from qarl_formats import SCALE_CONVENTIONS, get_format
from qarl_kernels import GemmOperand, QuantizedWeight, fp8, integer
from qarl_kernels.integer import integer_grid
from qarl_kernels.ops import split_reciprocal
from qarl_kernels.ops.integer_weights import (
    MAX_COLUMNS,
    int4_encode_fp8,
    integer_dequantize,
    integer_quantize_pack,
)
from qarl_kernels.ops.operand_gemm import QuantizedRows, multiply_rows
from qarl_kernels.ops.weights import (
    dequantize_operand,
    operand_from_weight,
    quantize_weight_kernel,
    quantize_with_operand,
)
from qarl_kernels.weights import quantize_weight_reference
from support.asserts import assert_bitwise_equal
from support.formats import uneven_weight
from support.triton_interpreter import DEVICE, INTERPRETED
from support.weights import LAYOUTS, WEIGHTS, heavy_tailed, significand_pairs

# The third, clipped_range, has tests of its own.
CONVENTIONS = ("narrow_range", "full_range")
SHAPES = (
    [(1, 128), (5, 768), (2, 18944), (3, 7, 384)]
    if INTERPRETED
    else [(1, 128), (2, 1, 768), (7, 1531, 2048), (5, 28672)]
)
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def assert_is_the_references(quantized, weight, group_size, convention, grid_bits=4, num_bits=4):
    """Everything that was written is what the reference computes."""
    codes, scale = integer.quantize_integer(weight, grid_bits, group_size, convention)
    assert_bitwise_equal(quantized.packed, integer.pack_int32(codes, num_bits))
    assert_bitwise_equal(quantized.scale, scale)
    largest = weight.float().unflatten(-1, (-1, group_size)).abs().amax(-1)
    assert quantized.nonfinite.tolist() == [int((largest >= integer.OVERFLOW).sum())]
    if quantized.dequantized is not None:
        assert_bitwise_equal(quantized.dequantized, integer.dequantize_integer(codes, scale))
    if quantized.w8 is not None:
        w8, channel_scale = fp8.encode_int4_as_fp8(codes, scale)
        assert_bitwise_equal(quantized.channel_scale, channel_scale)
        assert_bitwise_equal(quantized.w8, w8)


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    ("group_size", "emit"), [(32, "packed"), (32, "bf16"), (64, "bf16"), (128, "packed"), (128, "bf16"), (128, "fp8")]
)
def test_quantizes_as_the_reference(make, shape, convention, group_size, emit):
    weight = make(*shape).to(DEVICE)
    quantized = integer_quantize_pack(weight, group_size, convention, emit=emit)
    assert (quantized.dequantized is not None, quantized.w8 is not None) == (emit == "bf16", emit == "fp8")
    assert_is_the_references(quantized, weight, group_size, convention)


GRIDS = [(bits, convention, "bf16") for bits in (2, 3) for convention in CONVENTIONS]
GRIDS += [(2, "full_range", "fp8"), (4, "clipped_range", "bf16"), (4, "clipped_range", "fp8")]


@pytest.mark.parametrize(("grid_bits", "convention", "emit"), GRIDS)
def test_other_grids_are_quantized_as_the_reference(grid_bits, convention, emit):
    weight = significand_pairs(128, octaves=1).bfloat16().to(DEVICE)
    quantized = integer_quantize_pack(weight, 128, convention, grid_bits=grid_bits, emit=emit)
    assert_is_the_references(quantized, weight, 128, convention, grid_bits)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_is_the_references(quantized, weight, 128, "full_range")


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_codes_of_8_bits_are_quantized_as_the_reference(make, group_size):
    weight = make(*SHAPES[-1]).to(DEVICE)
    quantized = integer_quantize_pack(weight, group_size, "full_range", num_bits=8, emit="bf16")
    assert_is_the_references(quantized, weight, group_size, "full_range", 8, 8)


@pytest.mark.parametrize(
    ("grid_bits", "convention"),
    [
        *((8, convention) for convention in SCALE_CONVENTIONS),
        (7, "full_range"),
        (4, "narrow_range"),
        (2, "clipped_range"),
    ],
)
def test_grids_that_8_bits_hold(grid_bits, convention):
    weight = significand_pairs(128, octaves=1 if INTERPRETED else 8).bfloat16().to(DEVICE)
    quantized = integer_quantize_pack(weight, 128, convention, num_bits=8, grid_bits=grid_bits, emit="bf16")
    assert_is_the_references(quantized, weight, 128, convention, grid_bits, 8)


@pytest.mark.parametrize(
    ("served_bits", "convention"), [(2, "full_range"), (3, "clipped_range"), (4, "narrow_range"), (7, "full_range")]
)
def test_nested_codes_are_narrowed_as_the_reference(served_bits, convention):
    weight = significand_pairs(128, octaves=1 if INTERPRETED else 8).bfloat16().to(DEVICE)
    quantized = integer_quantize_pack(weight, 128, convention, num_bits=8, served_bits=served_bits, emit="bf16")
    whole = quantize_weight_reference(weight, get_format("w8a16", scale_convention=convention), name="weight")
    assert_bitwise_equal(quantized.packed, whole.tensors["weight_packed"])
    assert_bitwise_equal(quantized.scale, whole.tensors["weight_scale"])
    fmt = replace(get_format("w8a16", nested_in="w8a16", scale_convention=convention), grid_bits=served_bits)
    narrowed = QuantizedWeight(fmt, whole.shape, whole.tensors)
    assert_bitwise_equal(quantized.dequantized, narrowed.dequantize())
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(quantized.dequantized, whole.dequantize())


@pytest.mark.parametrize("format_name", ["w8a16", "w4a16", "w3a16", "w2a16", "w4a8"])
@pytest.mark.parametrize("nested_in", [None, "w8a16"])
def test_whole_weights_of_integer_formats(format_name, nested_in):
    fmt = get_format(format_name, nested_in=nested_in)
    weight = uneven_weight(2, 8, 256).to(DEVICE)
    expected = quantize_weight_reference(weight, fmt, name="weight")
    quantized, operand = quantize_with_operand(weight, fmt)
    for found in (quantized, quantize_weight_kernel(weight, fmt)):
        assert found.format == fmt
        for suffix, tensor in expected.tensors.items():
            assert_bitwise_equal(found.tensors[suffix], tensor)
    assert operand.format == fmt.narrowed
    own = GemmOperand.from_weight(expected, torch.bfloat16).effective_weight()
    for found in (operand, operand_from_weight(quantized.narrowed())):
        assert_bitwise_equal(found.effective_weight(), own)
    if fmt.activation_kind == "none":
        packed = operand_from_weight(quantized.narrowed(), packed=True)
        assert packed.is_packed
        assert_bitwise_equal(dequantize_operand(packed), own)


def test_packed_codes_of_8_bits_are_unpacked_for_the_gemm():
    quantized = quantize_weight_kernel(uneven_weight(2, 32, 128).to(DEVICE), get_format("w8a16", group_size=64))
    rows = QuantizedRows(torch.randn(3, 128).bfloat16().to(DEVICE), None)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    packed, unpacked = (
        multiply_rows(rows, operand_from_weight(quantized, packed=keep), offsets) for keep in (True, False)
    )
    assert_bitwise_equal(packed, unpacked)
    other = torch.tensor([0, 3, 3], dtype=torch.int32, device=DEVICE)
    assert not torch.equal(packed, multiply_rows(rows, operand_from_weight(quantized), other))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("emit", ["bf16", "fp8"])
def test_experts_may_lie_anywhere(layout, emit):
    weight = uneven_weight(4, 3, 256).to(DEVICE)
    quantized = integer_quantize_pack(layout(weight), 128, "full_range", emit=emit)
    assert_is_the_references(quantized, weight, 128, "full_range")
    with pytest.raises(AssertionError, match="elements differ"):
        assert_is_the_references(quantized, weight.flip(0), 128, "full_range")


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("exponent", [*(pytest.param(size, marks=pytest.mark.slow) for size in (-120, 120)), 0])
def test_all_pairs_of_significands(convention, exponent):
    # Scales below 2^-126 are clamped: at 2^-120 small maxima have ties of their own.
    weight = (significand_pairs(128, octaves=6).float() * 2.0**exponent).bfloat16().to(DEVICE)
    assert_is_the_references(integer_quantize_pack(weight, 128, convention, emit="fp8"), weight, 128, convention)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("reciprocal_error", [-(2.0**-21), 0.0, 2.0**-21])
def test_snapped_quotients_round_as_exact_ones(fused, reciprocal_error):
    # FP64 holds w * r + 3072 exactly: rounding that once is what a fused multiply-add does.
    weights, scales = torch.meshgrid(
        (torch.arange(128, 256) * 2.0 ** torch.arange(-12, 8)[:, None]).flatten() / 128,
        torch.arange(128, 256) / 128,
        indexing="ij",
    )
    within = weights <= 128 * scales
    weights, scales = weights[within].float(), scales[within].float()
    reciprocal = (1 / scales.double() * (1 + reciprocal_error)).float()
    exact = weights.double() * reciprocal.double() + 3072.0
    snapped = exact.float() if fused else weights * reciprocal + 3072.0
    assert_bitwise_equal(snapped + 12579840.0 - 12582912.0, torch.round(weights / scales))
    # Without the snapping, a reciprocal's rounding moves ties.
    unsnapped = (weights.double() * reciprocal.double()).float() + 12582912.0 - 12582912.0
    assert not torch.equal(unsnapped, torch.round(weights / scales))


@pytest.mark.parametrize("divisor", sorted({integer_grid(b, c)[2] for b in range(2, 9) for c in SCALE_CONVENTIONS}))
def test_scales_may_be_multiplied_by_a_rounded_reciprocal(divisor):
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    exact = (amax / divisor).bfloat16()
    multiplied = (amax * torch.tensor(1 / divisor)).bfloat16()
    clamp = integer.EMPTY_GROUP_SCALE
    assert_bitwise_equal(multiplied.clamp(min=clamp), exact.clamp(min=clamp))
    if not math.log2(divisor).is_integer():
        assert not torch.equal(amax * torch.tensor(1 / divisor), amax / divisor)


def test_the_largest_scale_may_be_divided_in_two_products():
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    amax = amax[amax >= 2.0**-100]
    high, low = torch.tensor(split_reciprocal._HIGH.value), torch.tensor(split_reciprocal._LOW.value)
    assert_bitwise_equal(amax * high + amax * low, amax / 448)
    assert not torch.equal(amax * (high + low), amax / 448)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_unpacks_as_the_reference(group_size, num_bits):
    codes = torch.randint(-(2 ** (num_bits - 1)), 2 ** (num_bits - 1), (3, 5, 384)).to(torch.int8)
    scale = heavy_tailed(3, 5, 384 // group_size).abs()
    packed = integer.pack_int32(codes, num_bits).to(DEVICE)
    weight = integer_dequantize(packed, scale.to(DEVICE), num_bits)
    assert_bitwise_equal(weight, integer.dequantize_integer(codes, scale).to(DEVICE))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(weight, integer.dequantize_integer(codes.flip(-1), scale).to(DEVICE))


@pytest.mark.parametrize("columns", [128, 768, 4224])
def test_encodes_as_the_reference(columns):
    codes = torch.randint(-8, 8, (3, columns), dtype=torch.int8)
    scale = heavy_tailed(3, columns // 128).abs().clamp(min=integer.EMPTY_GROUP_SCALE)
    scale[1] = integer.EMPTY_GROUP_SCALE
    packed = integer.pack_int32(codes, 4).to(DEVICE)
    w8, channel_scale = int4_encode_fp8(packed, scale.to(DEVICE))
    expected_w8, expected_scale = fp8.encode_int4_as_fp8(codes, scale)
    assert_bitwise_equal(channel_scale, expected_scale.to(DEVICE))
    assert_bitwise_equal(w8, expected_w8.to(DEVICE))


@pytest.mark.parametrize("emit", ["packed", "fp8"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf, 2.0**127, -3.38e38])
def test_counts_groups_with_nonfinite_weights(bad, emit):
    weight = uneven_weight(3, 2, 768).to(DEVICE)
    weight[0, 1, 5] = 2.0**127 * (1 - 2.0**-8)  # the largest number that is none of them
    weight[1, 0, 130:133] = bad
    weight[2, 1, 767] = bad
    assert integer_quantize_pack(weight, 128, "full_range", emit=emit).nonfinite.tolist() == [2]


def test_registered_operators_have_faithful_fakes():
    weight = uneven_weight(2, 3, 256).to(DEVICE)
    tests = ("test_schema", "test_faketensor")
    quantize = torch.ops.qarl.integer_quantize_pack.default
    for bits, emit in ((4, "packed"), (4, "bf16"), (4, "fp8"), (8, "bf16")):
        torch.library.opcheck(quantize, ([weight], 128, "full_range", bits, bits, bits, emit), test_utils=tests)
    quantized = integer_quantize_pack(weight, 128, "full_range")
    for op, more in ((torch.ops.qarl.integer_dequantize.default, (4,)), (torch.ops.qarl.int4_encode_fp8.default, ())):
        torch.library.opcheck(op, (quantized.packed, quantized.scale, *more), test_utils=tests)


def test_compiles_without_graph_breaks():
    weight = uneven_weight(2, 3, 256).to(DEVICE)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def roundtrip(weight):
        quantized = integer_quantize_pack(weight, 128, "full_range", emit="bf16")
        return quantized.dequantized, integer_dequantize(quantized.packed, quantized.scale)

    assert_bitwise_equal(*roundtrip(weight))


def test_results_need_no_gradient():
    weight = uneven_weight(3, 256).to(DEVICE).requires_grad_()
    assert not integer_quantize_pack(weight, 128, "full_range", emit="bf16").dequantized.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [LAYOUTS["reverse"], LAYOUTS["scattered"]])
def test_a_cuda_graph_sees_new_weights(layout):
    weights = layout(uneven_weight(4, 64, 2048).to(DEVICE))
    integer_quantize_pack(weights, 128, "full_range", emit="bf16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized = integer_quantize_pack(weights, 128, "full_range", emit="bf16")
    for _ in range(2):
        for weight in weights:
            weight.copy_(uneven_weight(64, 2048))
        graph.replay()
        assert_is_the_references(quantized, torch.stack(weights), 128, "full_range")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_all_pairs_of_bf16_numbers(convention, num_bits):
    """10^9 weights: groups of every finite maximum with every number up to it."""
    numbers = torch.arange(0x7F80, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    spread = torch.nn.functional.pad(numbers, (0, -len(numbers) % 127)).view(-1, 127)
    for amax in numbers.split(1024):
        weight = torch.minimum(spread[None], amax[:, None, None])
        weight = torch.cat([amax[:, None, None].expand(-1, len(spread), 1), -weight], -1).flatten(1)
        quantized = integer_quantize_pack(weight, 128, convention, num_bits=num_bits, emit="bf16")
        assert_is_the_references(quantized, weight, 128, convention, num_bits, num_bits)


def test_errors_name_everything_wrong():
    message = r"group_size=48 .*32, 64, 128.*'both'.*narrow_range.*grid_bits=5 .*grid <= 4.*'int8'.*packed, bf16"
    with pytest.raises(ValueError, match=message):
        integer_quantize_pack(torch.zeros(2, 96), 48, "both", grid_bits=5, emit="int8")
    with pytest.raises(ValueError, match=r"num_bits=5 \(legal: 4, 8\)"):
        integer_quantize_pack(torch.zeros(2, 96), 32, "full_range", num_bits=5)
    with pytest.raises(ValueError, match=r"num_bits=8 and served_bits=4 with emit='fp8'"):
        integer_quantize_pack(torch.zeros(2, 128), 128, "full_range", num_bits=8, served_bits=4, emit="fp8")
    with pytest.raises(ValueError, match=r"group_size=64 with emit='fp8' \(legal: 128\)"):
        integer_quantize_pack(torch.zeros(2, 128), 64, "full_range", emit="fp8")
    weights = [torch.zeros(2, 96, device=DEVICE), torch.zeros(2, 3, device=DEVICE).bfloat16().t()]
    message = r"\[0\] is torch.float32.*\[0\] has K=96.*\[1\] has K=2.*strides.*as the first, \[2, 96\]"
    with pytest.raises(ValueError, match=message):
        integer_quantize_pack(weights, 128, "full_range")
    with pytest.raises(ValueError, match=r"weights is \[128\] \(legal: \[N, K\] or \[E, N, K\]"):
        integer_quantize_pack(torch.zeros(128, device=DEVICE).bfloat16(), 128, "full_range")
    with pytest.raises(ValueError, match="empty list"):
        integer_quantize_pack([], 128, "full_range")
    wide = torch.zeros(1, MAX_COLUMNS + 128, device=DEVICE).bfloat16()
    with pytest.raises(ValueError, match=rf"K={MAX_COLUMNS + 128} \(legal: at most {MAX_COLUMNS}\)"):
        integer_quantize_pack(wide, 128, "full_range", emit="fp8")
    packed = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"scale torch.float32 .*scale is \[2, 3\] for packed \[2, 16\]"):
        integer_dequantize(packed, torch.zeros(2, 3, device=DEVICE))
    with pytest.raises(ValueError, match=r"num_bits=2 \(legal: 4, 8\)"):
        integer_dequantize(packed, torch.zeros(2, 1, device=DEVICE).bfloat16(), 2)
