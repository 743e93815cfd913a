import math
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from qarl_formats import SCALE_CONVENTIONS
from qarl_kernels import QuantizedWeight, gemm_operand, get_format, quantize_weight, stored_layout, weight_problems
from qarl_kernels.integer import dequantize_integer, quantize_integer
from support.asserts import assert_bitwise_equal
from support.formats import FORMATS, SUFFIXES, uneven_weight


@pytest.mark.parametrize("shape", [(128, 256), (1, 128), (130, 384), (3, 96, 128)])
def test_the_layout_is_known_without_quantizing(fmt, shape):
    stored = quantize_weight(uneven_weight(*shape), fmt)
    real = {suffix: (tuple(tensor.shape), tensor.dtype) for suffix, tensor in stored.tensors.items()}
    assert stored_layout(shape, fmt) == real
    assert tuple(real) == SUFFIXES[fmt.weight_kind]
    assert stored.shape == shape
    assert stored.num_bytes == sum(tensor.nbytes for tensor in stored.tensors.values())


@pytest.mark.parametrize("num_bits", range(2, 9))
def test_the_layout_of_every_bit_width(num_bits):
    fmt = get_format(f"w{num_bits}a16", group_size=32)
    stored = quantize_weight(uneven_weight(4, 96), fmt)
    real = {suffix: (tuple(tensor.shape), tensor.dtype) for suffix, tensor in stored.tensors.items()}
    assert stored_layout((4, 96), fmt) == real


@pytest.mark.parametrize("convention", ["narrow_range", "full_range"])
@pytest.mark.parametrize("bits", [2, 3])
def test_a_narrow_grid_is_stored_in_int4(bits, convention):
    options = {"group_size": 32, "scale_convention": convention}
    fmt, weight = get_format(f"w{bits}a16", **options), uneven_weight(3, 5, 96)
    stored = quantize_weight(weight, fmt)
    codes, scale = quantize_integer(weight, bits, 32, convention)
    # Eight codes a word with int4's offset of 8, as compressed-tensors packs them.
    assert_bitwise_equal(stored.tensors["weight_packed"], pack_to_int32(codes, 4))
    assert_bitwise_equal(stored.tensors["weight_scale"], scale)
    assert_bitwise_equal(stored.codes(), codes)
    assert_bitwise_equal(stored.dequantize(), dequantize_integer(codes, scale))
    # An engine of w4a16 multiplies the same weight; on int4's own grid it is another one.
    engine = QuantizedWeight(get_format("w4a16", group_size=32), stored.shape, stored.tensors)
    assert_bitwise_equal(gemm_operand(engine, torch.float32).values, gemm_operand(stored, torch.float32).values)
    assert not torch.equal(quantize_weight(weight, get_format("w4a16", **options)).dequantize(), stored.dequantize())


def test_stored_bytes_are_bits_per_weight(fmt):
    # A row has one FP32 scale in fp8_channel and int8, the whole weight has one in nvfp4.
    stored = quantize_weight(uneven_weight(256, 1920), fmt)
    scales = 256 if fmt.weight_kind.endswith("_rows") else int(fmt.tensor_scaled)
    assert stored.num_bytes == fmt.bits_per_weight * 256 * 1920 / 8 + 4 * scales


def largest_error(stored, weight):
    """Half a step of the stored grid, plus what BF16 adds: 2^-9 of the product and, where clamped, of the scale."""
    bf16_error = 2.0**-7 * weight.double().abs()
    scale = stored.tensors[SUFFIXES[stored.format.weight_kind][1]].double()
    if stored.format.weight_kind == "nvfp4":
        # E2M1: half of 2^-1 of the number's power of two, or half of the smallest code.
        step = (scale / stored.tensors["weight_global_scale"].double()).repeat_interleave(16, -1)
        return torch.maximum(weight.double().abs() / 4, step / 4) + bf16_error
    if stored.format.weight_kind == "int":
        return scale.repeat_interleave(stored.format.group_size, -1) / 2 + bf16_error
    if stored.format.weight_kind == "int8_rows":
        return scale / 2 + bf16_error
    if stored.format.weight_kind == "fp8_blocks":
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # E4M3: half of 2^-3 of the number's power of two, or half of 2^-9 below 2^-6.
    return torch.maximum(2.0**-4 * weight.double().abs(), 2.0**-10 * scale) + bf16_error


@pytest.mark.parametrize("key", [key for key, fmt in FORMATS.items() if fmt.is_quantized])
def test_dequantized_weights_are_within_half_a_step(key):
    fmt, weight = FORMATS[key], uneven_weight(256, 256)
    stored = quantize_weight(weight, fmt)
    bound = largest_error(stored, weight)
    assert stored.dequantize().dtype == torch.bfloat16
    within = lambda rebuilt: bool(((rebuilt.double() - weight.double()).abs() <= bound).all())  # noqa: E731
    assert within(stored.dequantize())
    suffix = SUFFIXES[fmt.weight_kind][1]
    shifted = stored.tensors | {suffix: stored.tensors[suffix].roll(1, 0)}
    assert not within(QuantizedWeight(fmt, stored.shape, shifted).dequantize())
    if fmt.weight_kind == "int":
        scale = stored.tensors["weight_scale"].repeat_interleave(fmt.group_size, -1)
        assert within(stored.codes() * scale)
        assert not within((stored.codes() + 1) * scale)


def test_bf16_is_stored_as_it_is():
    weight = uneven_weight(3, 5, 32)
    assert_bitwise_equal(quantize_weight(weight, get_format("bf16")).dequantize(), weight)


def test_masters_of_more_precision_are_rounded_to_bf16_first(fmt):
    weight = torch.randn(128, 256)
    stored, rounded = quantize_weight(weight, fmt), quantize_weight(weight.bfloat16(), fmt)
    for suffix, tensor in rounded.tensors.items():
        assert_bitwise_equal(stored.tensors[suffix], tensor)


def test_a_stored_weight_is_a_copy(fmt):
    weight = uneven_weight(128, 128).requires_grad_()
    before = weight.detach().clone()
    stored = quantize_weight(weight, fmt)
    kept = stored.dequantize().clone()
    assert_bitwise_equal(weight.detach(), before)
    assert not any(tensor.requires_grad for tensor in stored.tensors.values())
    with torch.no_grad():
        weight.zero_()
    assert_bitwise_equal(stored.dequantize(), kept)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_weight_names_tensor_and_index(fmt, bad):
    weight = uneven_weight(3, 128, 128)
    weight[2, 5, 100] = bad
    weight[1, 127, 3] = bad
    with pytest.raises(ValueError, match="NaN or Inf") as error:
        quantize_weight(weight, fmt, name="model.layers.3.mlp.experts.down_proj")
    message = str(error.value)
    expected = f"model.layers.3.mlp.experts.down_proj [3, 128, 128] (2, the first at index [1, 127, 3]: {bad})"
    assert expected in message


@pytest.mark.parametrize("largest", [2.0**127, 3.2e38, -3.38e38])
def test_no_stored_weight_is_infinite(fmt, largest):
    """Of integer formats code * scale may be: there a weight of 2^127 and more is refused, as NaN is.

    For nvfp4 that is 2^20, because its global scale overflows in the engine.
    """
    weight = uneven_weight(128, 128)
    weight[2, 5] = largest
    limit = {"int": 2.0**127, "nvfp4": 2.0**20}.get(fmt.weight_kind)
    if limit is not None:
        for refused in (largest, math.copysign(limit, largest)):
            weight[2, 5] = refused
            with pytest.raises(ValueError, match=r"here \[128, 128\] \(1, the first at index \[2, 5\]: "):
                quantize_weight(weight, fmt, name="here")
        largest = weight[2, 5] = math.copysign(limit * (1 - 2.0**-8), largest)
    values = quantize_weight(weight, fmt).dequantize()
    assert values.isfinite().all()
    assert values[2, 5].item() == pytest.approx(largest, rel=0.2)


def test_a_weight_beyond_bf16_counts_as_infinite():
    weight = torch.zeros(1, 128)
    weight[0, 7] = 3.4e38
    with pytest.raises(ValueError, match=r"index \[0, 7\]: inf"):
        quantize_weight(weight, get_format("w4a16"))


@pytest.mark.parametrize(
    ("name", "columns", "group_size", "fitting"),
    [
        ("w4a16", 192, 128, "[64, 32]"),
        ("w4a16", 96, 64, "[32]"),
        ("w4a16", 100, 32, "none of 128, 64, 32"),
        ("w4a16", 64, 128, "[64, 32]"),
        ("w4a8", 64, 128, "none of 128"),
    ],
)
def test_a_row_that_is_no_multiple_of_the_group_names_groups_that_fit(name, columns, group_size, fitting):
    fmt = get_format(name, group_size=group_size)
    with pytest.raises(ValueError, match="q_proj") as error:
        quantize_weight(torch.zeros(8, columns), fmt, name="q_proj")
    assert f"K={columns} is not a multiple of group_size={group_size}" in str(error.value)
    assert f"(group sizes that divide it: {fitting})" in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("fp8_block", (128, 192), "K=192 is not a multiple of 128, the activation group of fp8_block"),
        ("nvfp4", (128, 120), "K=120 is not a multiple of 16, the group of nvfp4"),
        ("fp8_channel", (128,), r"at least two dimensions \[N, K\], got shape \[128\]"),
        ("int8", (8, 0), r"at least one row and one column, got shape \[8, 0\]"),
        ("nvfp4", (0, 128), r"at least one row and one column, got shape \[0, 128\]"),
    ],
)
def test_shapes_that_a_format_cannot_store_are_refused(name, shape, said):
    with pytest.raises(ValueError, match=said):
        quantize_weight(torch.zeros(shape), get_format(name))


def test_arguments_that_no_format_takes_are_refused_by_name():
    fmt, weight, amax = get_format("nvfp4"), torch.ones(2, 8, 32), torch.ones(())
    with pytest.raises(
        ValueError, match=r"fc1 \[2, 8, 32\] .* amax has shape \[\] \(legal: \[2, 1\], one for each weight"
    ):
        quantize_weight(weight, fmt, name="fc1", amax=amax)
    with pytest.raises(
        ValueError, match=r"fc1 .* some have other shapes: \[4, 32\]; is torch.int32 \(legal: floating-point"
    ):
        quantize_weight([weight[0], torch.ones(4, 32, dtype=torch.int32)], fmt, name="fc1")
    with pytest.raises(ValueError, match="fc1: no weights to quantize"):
        quantize_weight([], fmt, name="fc1")


def test_rows_alone_are_bound_to_groups():
    assert weight_problems((192, 128), get_format("fp8_block")) == []
    assert weight_problems((8, 100), get_format("fp8_channel")) == []


@pytest.mark.parametrize("nested_in", [None, "w8a16"])
@pytest.mark.parametrize("convention", SCALE_CONVENTIONS)
def test_the_last_grid_of_a_schedule_has_a_format_with_the_same_weights(convention, nested_in):
    weight, options = torch.randn(16, 128), {"scale_convention": convention, "nested_in": nested_in}
    stage = replace(get_format("w8a16", **options), grid_bits=2)
    served = quantize_weight(weight, stage).dequantize()
    assert torch.equal(quantize_weight(weight, get_format("w2a16", **options)).dequantize(), served)
    assert not torch.equal(quantize_weight(weight, get_format("w3a16", **options)).dequantize(), served)
