"""NVFP4 in torch: the bytes of compressed-tensors, and every rounding by hand."""

import math

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

from qarl_kernels import GemmOperand, gemm, get_format, largest, nvfp4, quantize_weight
from support.asserts import assert_bitwise_equal
from support.formats import uneven_weight
from support.weights import heavy_tailed

NVFP4 = get_format("nvfp4")
GAUSSIAN = {
    "uneven": uneven_weight,
    "heavy_tailed": heavy_tailed,
    "plain": lambda *shape: torch.randn(shape).bfloat16(),
}


def stored(weight, **options):
    return quantize_weight(weight, NVFP4, **options).tensors


def by_compressed_tensors(weight):
    """What llm-compressor's NVFP4A16 scheme stores, from an FP32 weight: with a BF16 one its global scale is BF16."""
    weight, args = weight.float(), NVFP4A16["weights"]
    divisor = generate_gparam(weight.min(), weight.max())
    groups = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=divisor)
    module = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    return NVFP4PackedCompressor.compress(module, QuantizationScheme(targets=["Linear"], weights=args))


@pytest.fixture
def eager_codes(monkeypatch):
    # Compiled, it would need a C++ compiler; the function is the same.
    eager = FP4_E2M1_DATA.cast_to_fp4._torchdynamo_orig_callable
    monkeypatch.setattr(FP4_E2M1_DATA, "cast_to_fp4", staticmethod(eager))


@pytest.mark.usefixtures("eager_codes")
@pytest.mark.parametrize("draw", GAUSSIAN)
def test_stored_tensors_are_compressed_tensors(draw):
    weight = GAUSSIAN[draw](96, 256)
    actual, expected = stored(weight), by_compressed_tensors(weight)
    assert_bitwise_equal(actual["weight_global_scale"], expected["weight_global_scale"])
    assert expected["weight_scale"].float().min() >= nvfp4.LEAST_SCALE
    assert_bitwise_equal(actual["weight_scale"], expected["weight_scale"])
    assert_bitwise_equal(actual["weight_packed"], expected["weight_packed"])
    other = by_compressed_tensors(weight.roll(1, 0))
    for suffix in ("weight_scale", "weight_packed"):
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise_equal(actual[suffix], other[suffix])


@pytest.mark.usefixtures("eager_codes")
def test_only_scales_below_the_floor_are_others():
    weight = uneven_weight(32, 256) * torch.exp2(torch.randint(-20, 1, (32, 16)).float()).repeat_interleave(16, -1)
    weight = weight.bfloat16()
    actual, expected = stored(weight), by_compressed_tensors(weight)
    divisor, amax = actual["weight_global_scale"], weight.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    # Half of a subnormal step below the floor a scale still rounds up to it.
    above = divisor * amax / 6 >= nvfp4.LEAST_SCALE - 2.0**-10
    assert not above.all()
    assert torch.equal(actual["weight_scale"].float()[above], expected["weight_scale"].float()[above])
    words = above.repeat_interleave(8, -1)
    assert torch.equal(actual["weight_packed"][words], expected["weight_packed"][words])
    assert (actual["weight_scale"].float()[~above] == nvfp4.LEAST_SCALE).all()


def test_scales_and_codes_by_hand():
    # amax 6 of the weight: G = 448. Group 0: s = e4m3(448 * 6 / 6) = 448, so w / (s / G) = w. Group 1, amax 0.25:
    # 448 * 0.25 / 6 = 18.67 -> 18 (steps of 2, 9.33), so w / (18 / 448): 0.25 -> 6.22 -> 6, 0.1 -> 2.49 -> 2.
    weight = torch.zeros(1, 32)
    weight[0, :14] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, -0.2, 0.26, 1.74, 3.6, -0.5])
    weight[0, 16:18] = torch.tensor([0.25, -0.1001])
    tensors = stored(weight)
    assert tensors["weight_global_scale"].tolist() == [448.0]
    assert tensors["weight_scale"].float().tolist() == [[448.0, 18.0]]
    # A tie goes to the even code: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. A negative
    # weight that becomes 0 keeps its sign, as in compressed-tensors.
    index = [7, 0, 2, 2, 4, 4, 6, 6, 6 + 8, 0 + 8, 1, 3, 6, 1 + 8]
    codes = nvfp4.unpack(tensors["weight_packed"])[0]
    assert codes[:14].tolist() == index
    assert codes[16:18].tolist() == [7, 4 + 8]
    # The even column is in the low bits.
    assert tensors["weight_packed"][0, :2].tolist() == [7 | 0 << 4, 2 | 2 << 4]
    values = quantize_weight(weight, NVFP4).dequantize()[0]
    assert values[:3].tolist() == [6.0, 0.0, 1.0]
    assert values[16].item() == pytest.approx(6 * 18 / 448, rel=2**-8)


def test_the_grid_is_that_of_e2m1():
    codes = torch.arange(16, dtype=torch.uint8)[None]
    scale = torch.tensor([[1.0]]).to(torch.float8_e4m3fn)
    values = nvfp4.unscaled(nvfp4.pack(codes), scale)[0].tolist()
    # sign, exponent of two bits with bias 1, one fraction bit
    expected = [math.ldexp(1 + (c & 1) / 2, (c >> 1 & 3) - 1) if c & 6 else (c & 1) / 2 for c in range(8)]
    assert values == [*expected, *(-value for value in expected)]
    assert_bitwise_equal(nvfp4.unpack(nvfp4.pack(codes)), codes)


def test_what_marlin_multiplies_is_exact_in_bf16():
    scale = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(126)[None]
    exact = torch.tensor([*nvfp4.GRID, *(-one for one in nvfp4.GRID)], dtype=torch.float64).repeat(126)
    exact = exact * scale.double().repeat_interleave(16, -1)
    assert torch.equal(nvfp4.unscaled(nvfp4.pack(codes), scale).double(), exact)


def test_the_global_scale_multiplies_the_sum_not_the_weights():
    weight, x = uneven_weight(64, 256), torch.randn(9, 256).bfloat16()
    operand = GemmOperand.from_weight(quantize_weight(weight, NVFP4), torch.bfloat16)
    factor = 1 / stored(weight)["weight_global_scale"]
    assert_bitwise_equal(operand.tensor_scale.flatten(), factor)
    sums = x.float() @ operand.values.float().mT
    assert_bitwise_equal(gemm(x, operand), (sums * factor).bfloat16())
    # As those do that decompress weights to BF16 first.
    early = x.float() @ (operand.values * factor).bfloat16().float().mT
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(gemm(x, operand), early.bfloat16())


def test_weights_that_engines_fuse_share_their_scale():
    small, large = uneven_weight(32, 64), 4 * uneven_weight(48, 64)
    amax = torch.maximum(largest(small), largest(large))
    fused, whole = [stored(part, amax=amax) for part in (small, large)], stored(torch.cat([small, large]))
    for suffix in ("weight_packed", "weight_scale"):
        joined = torch.cat([part[suffix].view(torch.uint8) for part in fused])
        assert_bitwise_equal(joined, whole[suffix].view(torch.uint8))
    assert all(torch.equal(part["weight_global_scale"], whole["weight_global_scale"]) for part in fused)
    assert not torch.equal(stored(small)["weight_packed"], fused[0]["weight_packed"])


def test_every_expert_has_its_own_scale():
    stack = uneven_weight(3, 32, 64) * torch.tensor([1.0, 8.0, 0.25])[:, None, None]
    assert largest(stack).shape == (3, 1)
    whole = stored(stack)
    for expert in range(3):
        for suffix, tensor in stored(stack[expert]).items():
            assert_bitwise_equal(whole[suffix][expert], tensor)


@pytest.mark.parametrize("size", [0.0, 2.0**-133, 1e-36])
def test_weights_too_small_for_a_global_scale_become_zero(size):
    weight = torch.full((16, 64), size).bfloat16()
    tensors = stored(weight)
    assert tensors["weight_global_scale"].tolist() == [1.0]
    assert not nvfp4.unpack(tensors["weight_packed"]).any()
    assert not quantize_weight(weight, NVFP4).dequantize().any()
