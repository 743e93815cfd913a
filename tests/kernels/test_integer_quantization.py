import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams

from qarl_kernels import GemmOperand, get_format, quantize_weight
from qarl_kernels.integer import dequantize_integer, integer_grid, quantize_integer
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import uneven_weight

CONVENTIONS = ("narrow_range", "full_range", "clipped_range")


def padded_group(*values, size=32):
    """One row of one group: the values, then zeros."""
    return torch.tensor([[*values, *[0.0] * (size - len(values))]])


def first_codes(weight, convention, num_bits=4):
    codes, scale = quantize_integer(weight, num_bits, 32, convention)
    return codes[0].tolist(), scale[0, 0].item()


def test_narrow_range_by_hand():
    # amax 7 -> scale 7 / 7 = 1; codes are the values rounded half to even: 2.5 -> 2, 3.5 -> 4, -0.5 -> -0.
    codes, scale = first_codes(padded_group(7, -7, 2.5, 3.5, -0.5, -1.2, 6.6), "narrow_range")
    assert scale == 1.0
    assert codes[:7] == [7, -7, 2, 4, 0, -1, 7]
    assert codes[7:] == [0] * 25


def test_full_range_by_hand():
    # amax 7.5 -> scale 7.5 / 7.5 = 1; -7.5 rounds half to even to -8, which this grid has; 7.5 to 8, clamped to 7.
    codes, scale = first_codes(padded_group(7.5, -7.5, 2.5, -6.4), "full_range")
    assert scale == 1.0
    assert codes[:4] == [7, -8, 2, -6]


def test_clipped_range_by_hand():
    # amax 8 -> scale 8 / 8 = 1: -8 is a code, and 8 would be the code after the largest, 7.
    codes, scale = first_codes(padded_group(8.0, -8.0, 2.5, -6.4), "clipped_range")
    assert scale == 1.0
    assert codes[:4] == [7, -8, 2, -6]


def test_scale_of_the_other_convention_by_hand():
    # amax 15: narrow 15 / 7 = 2.142857, in BF16 (8 significant bits, steps of 2^-6 here) 137 / 64 = 2.140625;
    # full 15 / 7.5 = 2.
    assert first_codes(padded_group(15.0), "narrow_range") == ([7, *[0] * 31], 2.140625)
    assert first_codes(padded_group(15.0), "full_range") == ([7, *[0] * 31], 2.0)
    # -15 / 2.140625 = -7.007 -> -7; -15 / 2 = -7.5 -> -8 (half to even).
    assert first_codes(padded_group(-15.0), "narrow_range")[0][0] == -7
    assert first_codes(padded_group(-15.0), "full_range")[0][0] == -8


@pytest.mark.parametrize(
    ("num_bits", "convention", "grid"),
    [
        (4, "narrow_range", (-7, 7, 7.0)),
        (4, "full_range", (-8, 7, 7.5)),
        (2, "narrow_range", (-1, 1, 1.0)),
        (2, "full_range", (-2, 1, 1.5)),
        (3, "full_range", (-4, 3, 3.5)),
        (4, "clipped_range", (-8, 7, 8.0)),
        (2, "clipped_range", (-2, 1, 2.0)),
        (8, "narrow_range", (-127, 127, 127.0)),
        (8, "full_range", (-128, 127, 127.5)),
    ],
)
def test_grids(num_bits, convention, grid):
    assert integer_grid(num_bits, convention) == grid


@pytest.mark.parametrize("num_bits", range(2, 9))
@pytest.mark.parametrize("group_size", [32, 128])
def test_full_range_is_compressed_tensors(num_bits, group_size):
    weight = uneven_weight(16, 256)
    codes, scale = quantize_integer(weight, num_bits, group_size, "full_range")
    args = QuantizationArgs(num_bits=num_bits, type="int", strategy="group", group_size=group_size, symmetric=True)
    groups = weight.unflatten(-1, (-1, group_size))
    their_scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    assert_bitwise_equal(scale, their_scale)
    # In FP32, as here: with BF16 weights their division rounds the quotient to BF16 before it is rounded to a code.
    theirs = quantize(weight.float(), their_scale.float(), zero_point.float(), args, dtype=torch.int8)
    assert_bitwise_equal(codes, theirs)
    narrow, _ = quantize_integer(weight, num_bits, group_size, "narrow_range")
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(narrow, theirs)


def quantize_rounding_the_scale_too_late(weight, group_size):
    groups = weight.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1) / 7.5
    codes = torch.round(groups / scale.unsqueeze(-1)).clamp(-8, 7).to(torch.int8).flatten(-2)
    return codes, scale.to(torch.bfloat16)


def test_the_scale_is_rounded_before_codes_are_computed():
    # amax 1.28125 / 7.5 = 0.170833, in BF16 (steps of 2^-10 here) 175 / 1024 = 0.170898. The value 0.76892 lies
    # at 4.49932 of the rounded scale (code 4) and at 4.50104 of the unrounded one (code 5).
    weight = padded_group(1.28125, 0.76892)
    codes, scale = quantize_integer(weight, 4, 32, "full_range")
    late_codes, late_scale = quantize_rounding_the_scale_too_late(weight, 32)
    assert scale.item() == late_scale.item() == 175 / 1024
    assert codes[0, :2].tolist() == [7, 4]
    assert late_codes[0, :2].tolist() == [7, 5]


def test_codes_are_the_nearest_points_of_the_stored_grid():
    weight = torch.randn(64, 256)
    codes, scale = quantize_integer(weight, 4, 64, "full_range")
    wide = scale.double().repeat_interleave(64, -1)
    best = (weight.double()[..., None] - wide[..., None] * torch.arange(-8, 8)).abs().amin(-1)
    error = lambda chosen: (weight.double() - chosen.double() * wide).abs()  # noqa: E731
    # One ULP of the FP32 quotient may decide a tie.
    assert torch.allclose(error(codes), best, rtol=1e-6, atol=0)
    late_codes, _ = quantize_rounding_the_scale_too_late(weight, 64)
    assert not torch.allclose(error(late_codes), best, rtol=1e-6, atol=0)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_an_all_zero_group_has_the_smallest_scale_and_stays_zero(convention):
    weight = torch.zeros(2, 64)
    weight[0, 32:] = 7.0
    fmt = get_format("w4a16", group_size=32, scale_convention=convention)
    stored = quantize_weight(weight, fmt)
    tiny = 2.0**-126
    assert stored.tensors["weight_scale"][:, 0].tolist() == [tiny, tiny]
    assert stored.tensors["weight_scale"][1].tolist() == [tiny, tiny]
    assert stored.codes()[0, :32].eq(0).all()
    assert stored.codes()[1].eq(0).all()
    assert_bitwise_equal(stored.dequantize()[1], torch.zeros(64).bfloat16())


def test_an_empty_group_does_not_coarsen_w4a8_in_the_rest_of_its_row():
    # A scale of 1 for the empty group would set the FP8 channel scale to 8/448 and leave the others subnormal scales.
    weight = torch.zeros(1, 256)
    weight[0, 128:] = torch.linspace(-3e-5, 3e-5, 128)
    operand = GemmOperand.from_weight(quantize_weight(weight, get_format("w4a8")), torch.float32)
    assert_snr(operand.effective_weight()[:, 128:], weight.bfloat16().double()[:, 128:], min_db=15)


def test_negative_zero_becomes_zero():
    weight = padded_group(1.0, -0.0)
    assert_bitwise_equal(
        quantize_weight(weight, get_format("w4a16", group_size=32)).dequantize()[0, 1:2], torch.zeros(1).bfloat16()
    )


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_plus_and_minus_the_group_maximum_get_the_outermost_codes(num_bits, convention):
    # A maximum of exactly the divisor has scale 1; in full range it lies between two integers, the even one outside.
    code_min, code_max, divisor = integer_grid(num_bits, convention)
    codes, scale = first_codes(padded_group(divisor, -divisor), convention, num_bits)
    assert scale == 1.0
    assert codes[:2] == [code_max, code_min]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_no_code_leaves_the_grid(convention):
    code_min, code_max, _ = integer_grid(4, convention)
    codes, _ = quantize_integer(uneven_weight(256, 256), 4, 32, convention)
    assert (codes.min(), codes.max()) == (code_min, code_max)


def test_no_scale_is_denormal():
    # BF16's smallest normal number is t = 2^-126: a smaller scale would have a reciprocal that FP32 cannot hold.
    t = 2.0**-126
    codes, scale = first_codes(padded_group(t / 8, -t, 3 * t), "full_range")
    assert (codes[:4], scale) == ([0, -1, 3, 0], t)
    codes, scale = first_codes(padded_group(t / 8, -t / 4), "full_range")
    assert (codes, scale) == ([0] * 32, t)
    # Twice the group maximum at which amax / 7.5 rounds to t.
    codes, scale = first_codes(padded_group(15 * t, -15 * t), "full_range")
    assert (codes[:2], scale) == ([7, -8], 2 * t)


def test_one_row_is_the_row_of_many():
    weight = uneven_weight(5, 256)
    for row in range(5):
        codes, scale = quantize_integer(weight[row : row + 1], 4, 128, "full_range")
        all_codes, all_scales = quantize_integer(weight, 4, 128, "full_range")
        assert_bitwise_equal(codes, all_codes[row : row + 1])
        assert_bitwise_equal(scale, all_scales[row : row + 1])


def test_stacked_experts_are_quantized_one_by_one():
    weight, fmt = uneven_weight(3, 8, 128), get_format("w4a16", group_size=64)
    stacked = quantize_weight(weight, fmt)
    for expert in range(3):
        alone = quantize_weight(weight[expert], fmt)
        for suffix, tensor in alone.tensors.items():
            assert_bitwise_equal(stacked.tensors[suffix][expert], tensor)
        assert_bitwise_equal(stacked.dequantize()[expert], alone.dequantize())


def test_dequantization_rounds_the_product_to_bf16():
    # 7 * 131/128 = 7.1640625 has 10 significant bits; BF16 keeps 8: steps of 2^-5 at 7, so 229/32 = 7.15625.
    scale = torch.tensor([[131 / 128]]).bfloat16()
    codes = torch.tensor([[7, -7, 1, 0]], dtype=torch.int8)
    assert dequantize_integer(codes, scale)[0].tolist() == [229 / 32, -229 / 32, 131 / 128, 0.0]


def test_quantizing_what_was_dequantized_changes_nothing_narrow():
    # A narrow-range group whose maximum got the outermost code has its scale back: 7 s / 7 = s unless bf16(7 s) rounds.
    weight = padded_group(*[0.25 * code for code in range(-7, 8)])
    fmt = get_format("w4a16", group_size=32, scale_convention="narrow_range")
    once = quantize_weight(weight, fmt)
    twice = quantize_weight(once.dequantize(), fmt)
    assert once.codes()[0, :15].tolist() == list(range(-7, 8))
    for suffix, tensor in once.tensors.items():
        assert_bitwise_equal(twice.tensors[suffix], tensor)


def test_blurred_weights_stay_in_the_step_that_they_were_rounded_from(tools):
    tools("bench/kernels")
    from scale_convention import blurred

    # A largest weight of 16 has steps of 1, so that nothing moves by more than a half.
    codes = torch.cat([padded_group(-16.0, 3.0, 7.0, 15.0), padded_group(0.5, 0.25)]).to(torch.bfloat16)
    moved = blurred(codes)
    assert moved[0, 0] == -16.0
    assert moved[1, 0] == 0.5
    assert (moved[0] - codes[0]).abs().max() <= 0.5
    assert (moved[1] - codes[1]).abs().max() <= 0.5 / 32
    assert (moved != codes).float().mean() > 0.9
