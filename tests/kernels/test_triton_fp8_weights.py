from functools import partial

import pytest
import torch

from qarl_kernels import fp8
from qarl_kernels.ops.eight_bit_weights import MAX_COLUMNS, dequantize_8_bits, quantize_8_bits
from support.asserts import assert_bitwise_equal
from support.formats import uneven_weight
from support.triton_interpreter import DEVICE, INTERPRETED
from support.weights import LAYOUTS, WEIGHTS, significand_pairs

SHAPES = [(1, 384), (130, 768), (3, 7, 264), (2, 18944)]
if not INTERPRETED:
    SHAPES += [(2, 1, 264), (7, 1531, 2048), (300, 28672)]
fp8_channel_quantize = partial(quantize_8_bits, kind="fp8_rows")
fp8_block_quantize = partial(quantize_8_bits, kind="fp8_blocks")
fp8_block_dequantize = partial(dequantize_8_bits, block=True)
QUANTIZE = {
    "channel": (fp8_channel_quantize, fp8.quantize_channel, dequantize_8_bits),
    "block": (fp8_block_quantize, fp8.quantize_block, fp8_block_dequantize),
}
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def assert_is_the_references(quantized, weight, reference):
    w8, scale, nonfinite = quantized
    expected_w8, expected_scale = reference(weight)
    assert_bitwise_equal(scale, expected_scale)
    assert_bitwise_equal(w8, expected_w8)
    assert nonfinite.tolist() == [0]


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", QUANTIZE)
def test_quantizes_and_dequantizes_as_the_reference(make, shape, kind):
    quantize, reference, dequantize = QUANTIZE[kind]
    weight = make(*shape[:-1], -(-shape[-1] // 32) * 32)[..., : shape[-1]].contiguous().to(DEVICE)
    w8, scale, nonfinite = quantize(weight)
    assert_is_the_references((w8, scale, nonfinite), weight, reference)
    wide = scale if kind == "channel" else fp8.expand_block_scale(scale, *shape[-2:])
    assert_bitwise_equal(dequantize(w8, scale), (w8.float() * wide).bfloat16())


def test_scales_of_the_wrong_axis_are_told_apart():
    weight = uneven_weight(256, 256).to(DEVICE)
    w8, scale, _ = fp8_block_quantize(weight)
    expected = (w8.float() * fp8.expand_block_scale(scale, 256, 256)).bfloat16()
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(fp8_block_dequantize(w8, scale.t().contiguous()), expected)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_is_the_references(fp8_channel_quantize(weight), weight.flip(0), fp8.quantize_channel)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", QUANTIZE)
def test_experts_may_lie_anywhere(layout, kind):
    quantize, reference, _ = QUANTIZE[kind]
    weight = uneven_weight(4, 3, 256).to(DEVICE)
    assert_is_the_references(quantize(layout(weight)), weight, reference)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_is_the_references(quantize(layout(weight)), weight.flip(0), reference)


# 2^-120: the scale is subnormal. From 2^-17 of the maximum on all quotients round to zero.
@pytest.mark.parametrize("exponent", [-120, -110, 0, 127])
def test_all_pairs_of_significands(exponent):
    weight = (significand_pairs(4096, octaves=20).float() * 2.0**exponent).bfloat16().to(DEVICE)
    assert_is_the_references(fp8_channel_quantize(weight), weight, fp8.quantize_channel)


def test_a_product_with_the_rounded_reciprocal_is_not_the_quotient():
    # Why kernels split the reciprocal.
    weight = significand_pairs(4096, octaves=20).float()
    scale = weight.amax(-1, keepdim=True) / 448
    assert not torch.equal(fp8.cast_fp8(weight * (1 / scale)).float(), fp8.cast_fp8(weight / scale).float())


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "count"), [("channel", 3), ("block", 2)])
def test_counts_rows_or_blocks_with_nonfinite_weights(bad, kind, count):
    weight = uneven_weight(3, 2, 768).to(DEVICE)
    weight[1, 0, 130:133] = bad
    weight[2, :, 767] = bad
    assert QUANTIZE[kind][0](weight)[2].tolist() == [count]


def test_registered_operators_have_faithful_fakes():
    weight = uneven_weight(2, 3, 256).to(DEVICE)
    tests = ("test_schema", "test_faketensor")
    for kind, (quantize, _, _) in QUANTIZE.items():
        op = torch.ops.qarl.quantize_8_bits.default
        torch.library.opcheck(op, ([weight], quantize.keywords["kind"]), test_utils=tests)
        w8, scale, _ = quantize(weight)
        # The other check multiplies inputs, which torch cannot for FP8.
        op = torch.ops.qarl.dequantize_8_bits.default
        torch.library.opcheck(op, (w8, scale, kind == "block"), test_utils="test_faketensor")


@pytest.mark.gpu
@pytest.mark.slow
def test_all_pairs_of_bf16_numbers():
    """10^9 weights: rows of every finite maximum with every number up to it."""
    numbers = torch.arange(0x7F80, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    spread = torch.nn.functional.pad(numbers, (0, -len(numbers) % 8191)).view(-1, 8191)
    for amax in numbers.split(1024):
        weight = torch.minimum(spread[None], amax[:, None, None])
        weight = torch.cat([amax[:, None, None].expand(-1, len(spread), 1), -weight], -1).flatten(0, 1)
        assert_is_the_references(fp8_channel_quantize(weight), weight, fp8.quantize_channel)


def test_errors_name_everything_wrong():
    weights = [torch.zeros(2, 12, device=DEVICE), torch.zeros(2, 16, device=DEVICE).bfloat16()]
    with pytest.raises(ValueError, match=r"weights\[0\] is torch.float32.*K=12 \(legal: multiples of 8.*weights\[1\]"):
        fp8_block_quantize(weights)
    wide = torch.zeros(1, MAX_COLUMNS + 8, device=DEVICE).bfloat16()
    with pytest.raises(ValueError, match=rf"K={MAX_COLUMNS + 8} \(legal: at most {MAX_COLUMNS}\)"):
        fp8_channel_quantize(wide)
    w8 = torch.zeros(130, 256, device=DEVICE).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scale is \[1, 2\] \(legal: \[2, 2\]\)"):
        fp8_block_dequantize(w8, torch.ones(1, 2, device=DEVICE))
    with pytest.raises(ValueError, match=r"scale torch.float64.*scale is \[130\] \(legal: \[130, 1\]\)"):
        dequantize_8_bits(w8, torch.ones(130, dtype=torch.float64, device=DEVICE))
