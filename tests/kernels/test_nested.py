"""Nested grids: what an engine rounds from 8-bit codes is what the learner multiplied."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from qarl_formats import SCALE_CONVENTIONS
from qarl_kernels import QuantizedWeight, gemm_operand, get_format, quantize_weight, stored_layout
from qarl_kernels.integer import pack_int32
from qarl_kernels.nested import narrow_tensor
from support.asserts import assert_bitwise_equal
from support.formats import uneven_weight

WHOLE = get_format("w8a16", group_size=32)


def nested(name, **options):
    return get_format(name, nested_in="w8a16", **{"group_size": 32} | options)


def rounded(codes, bits):
    """The definition, code by code: to the nearest multiple of 2^(8-bits), ties to the even one."""
    return torch.round(codes.double() / 2 ** (8 - bits)).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)


@pytest.mark.parametrize(
    ("name", "bits", "own_width"),
    [("w4a16", 4, False), ("w3a16", 3, False), ("w2a16", 2, False), ("w2a16", 2, True), ("w8a16", 8, False)],
)
def test_every_code_is_rounded_in_every_place_of_a_word(name, bits, own_width):
    # Row r begins with code r - 128, so that each of the 256 codes stands in each of eight neighbouring places.
    codes = ((torch.arange(256)[:, None] + torch.arange(32)) % 256 - 128).to(torch.int8)
    fmt = nested(name, own_width=own_width)
    narrowed = narrow_tensor("weight_packed", pack_int32(codes, 8), fmt)
    assert_bitwise_equal(narrowed, pack_to_int32(rounded(codes, bits), fmt.num_bits))
    if bits < 8:
        shifted = (codes.int() >> (8 - bits)).to(torch.int8)
        assert not torch.equal(narrowed, pack_int32(shifted, fmt.num_bits))


def test_by_hand():
    # In steps of 16: 7.9 -> 8, beyond the largest; -8; 0.5 -> 0; 1.5 -> 2; -0.5 -> 0; -1.5 -> -2; 0.44 -> 0; 0.56 -> 1.
    codes = torch.tensor([[127, -128, 8, 24, -8, -24, 7, 9]], dtype=torch.int8)
    words = narrow_tensor("weight_packed", pack_int32(codes, 8), nested("w4a16"))
    assert_bitwise_equal(words, pack_int32(torch.tensor([[7, -8, 0, 2, 0, -2, 0, 1]], dtype=torch.int8), 4))
    assert narrow_tensor("weight_scale", torch.tensor([0.375]).bfloat16(), nested("w2a16")) == 0.375 * 64


@pytest.mark.parametrize("convention", SCALE_CONVENTIONS)
@pytest.mark.parametrize("name", ["w4a16", "w2a16", "w4a8"])
def test_learner_and_engine_multiply_the_same(name, convention):
    fmt = nested(name, group_size=128, scale_convention=convention)
    weight = uneven_weight(3, 6, 256)
    stored = quantize_weight(weight, fmt)
    whole = quantize_weight(weight, get_format("w8a16", scale_convention=convention))
    for suffix, tensor in whole.tensors.items():
        assert_bitwise_equal(stored.tensors[suffix], tensor)
    assert stored_layout(stored.shape, fmt) == stored_layout(stored.shape, whole.format)
    # An engine knows nothing of nesting: it holds words of its own format.
    arrived = {suffix: narrow_tensor(suffix, tensor, fmt) for suffix, tensor in whole.tensors.items()}
    plain = get_format(name, scale_convention=convention)
    assert {key: (tuple(one.shape), one.dtype) for key, one in arrived.items()} == stored_layout(stored.shape, plain)
    engine = QuantizedWeight(plain, stored.shape, arrived)
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = gemm_operand(stored, dtype), gemm_operand(engine, dtype)
        assert_bitwise_equal(ours.effective_weight(), theirs.effective_weight())
        assert ours.format == plain
    assert_bitwise_equal(stored.dequantize(), engine.dequantize())
    own = quantize_weight(weight, plain)
    assert not torch.equal(own.dequantize(), stored.dequantize())


def snr_db(weight, fmt):
    error = quantize_weight(weight, fmt).dequantize().double() - weight.double()
    return float(10 * torch.log10(weight.double().square().sum() / error.square().sum()))


@pytest.mark.parametrize(("name", "bits"), [("w4a16", 4), ("w2a16", 2)])
def test_nesting_costs_nothing(name, bits):
    weight = torch.randn(128, 1024).bfloat16()
    own, found = (snr_db(weight, fmt) for fmt in (get_format(name), nested(name, group_size=128)))
    assert found > own
    # Rounding down, which a shift does, loses several dB.
    whole = quantize_weight(weight, get_format("w8a16"))
    shifted = pack_int32((whole.codes().int() >> (8 - bits)).to(torch.int8), 4)
    scale = whole.tensors["weight_scale"] * 2.0 ** (8 - bits)
    tensors = {"weight_packed": shifted, "weight_scale": scale}
    error = QuantizedWeight(get_format(name), whole.shape, tensors).dequantize().double() - weight.double()
    assert own - 10 * torch.log10(weight.double().square().sum() / error.square().sum()) > 3


def test_the_record_of_a_nested_format():
    fmt = nested("w2a16")
    assert (fmt.published_name, fmt.code_bits, fmt.bits_per_weight) == ("w8a16", 8, 8.5)
    assert fmt.narrowed == get_format("w2a16", group_size=32)
    assert (WHOLE.published_name, WHOLE.narrowed) == ("w8a16", WHOLE)


@pytest.mark.parametrize(
    ("name", "finer", "problem"),
    [
        ("w4a16", "w6a16", "nested_in='w6a16' .legal: w8a16, for codes stored in 8, 4 or 2 bits"),
        ("w5a16", "w8a16", "format 'w5a16' cannot take nested_in='w8a16'"),
        ("fp8_block", "w8a16", "format 'fp8_block' takes no nested_in=w8a16"),
    ],
)
def test_nestings_that_cannot_be_are_refused(name, finer, problem):
    with pytest.raises(ValueError, match=problem):
        get_format(name, nested_in=finer)
