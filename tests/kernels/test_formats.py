import dataclasses
import re

import pytest

from qarl_formats import FORMAT_NAMES, get_format, served_formats

# weight_kind, activation_kind, num_bits, group_size, scale_convention, router_weight
EXPECTED = {
    "w4a16": ("int", "none", 4, 128, "full_range", "rounded_product"),
    "w4a8": ("int", "fp8_token", 4, 128, "full_range", "weighted_sum"),
    "fp8_block": ("fp8_blocks", "fp8_group", 8, 128, None, "on_accumulator"),
    "fp8_channel": ("fp8_rows", "fp8_token", 8, 0, None, "weighted_sum"),
    "int8": ("int8_rows", "int8_token", 8, 0, None, "on_accumulator"),
    "nvfp4": ("nvfp4", "none", 4, 16, None, "scaled_product"),
    "w8a16": ("int", "none", 8, 128, "full_range", "rounded_product"),
    "bf16": ("plain", "none", 16, 0, None, "on_accumulator"),
}


def test_every_name_has_its_record():
    assert set(FORMAT_NAMES) == set(EXPECTED)
    for name, expected in EXPECTED.items():
        fmt = get_format(name)
        arithmetic = fmt.weight_kind, fmt.activation_kind, fmt.num_bits, fmt.group_size, fmt.scale_convention
        assert (fmt.name, *arithmetic, fmt.router_weight) == (name, *expected)
        assert fmt.vllm


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_wide_grids_are_w4a16_in_other_bits_which_no_run_refits(bits):
    fmt, narrow = get_format(f"w{bits}a16", group_size=64), get_format("w4a16", group_size=64)
    assert fmt == dataclasses.replace(narrow, name=f"w{bits}a16", num_bits=bits, grid_bits=bits, vllm=fmt.vllm)
    assert fmt.vllm.linear.followed == ("HummingLinearKernel",)
    assert fmt.served_on("cuda") is fmt.served_on("cpu") is None
    assert fmt.name not in served_formats("cuda")


@pytest.mark.parametrize("bits", [2, 3])
def test_in_their_own_width_narrow_codes_are_stored_as_wide_ones_are(bits):
    own, stored_as_int4 = get_format(f"w{bits}a16", own_width=True), get_format(f"w{bits}a16")
    assert own == dataclasses.replace(stored_as_int4, num_bits=bits, vllm=own.vllm)
    assert own.bits_per_weight == bits + 0.125
    wide = get_format("w5a16").vllm
    method = f"CompressedTensorsLinearMethod/CompressedTensorsWNA16 of {bits}-bit codes"
    assert own.vllm == dataclasses.replace(wide, linear=dataclasses.replace(wide.linear, method=method))
    assert own.served_on("cuda") is None
    assert stored_as_int4.served_on("cuda")


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w8a16", "w5a16", "w6a16", "w7a16"])
def test_other_codes_have_their_own_width_already(name):
    assert get_format(name, own_width=True) == get_format(name)


@pytest.mark.parametrize("name", ["fp8_block", "int8", "bf16"])
def test_formats_without_a_grid_have_no_own_width(name):
    with pytest.raises(ValueError, match=rf"'{name}' takes no own_width=True: only .* leave it out$"):
        get_format(name, own_width=True)


@pytest.mark.parametrize("bits", [2, 3])
def test_narrow_grids_are_stored_and_served_as_w4a16(bits):
    assert get_format(f"w{bits}a16", group_size=64) == dataclasses.replace(
        get_format("w4a16", group_size=64), name=f"w{bits}a16", grid_bits=bits
    )


def test_options_of_integer_formats():
    fmt = get_format("w4a16", group_size=32, scale_convention="narrow_range")
    assert (fmt.group_size, fmt.scale_convention) == (32, "narrow_range")
    assert get_format("w4a8", scale_convention="narrow_range").scale_convention == "narrow_range"


@pytest.mark.parametrize("name", ["w4a4", "w1a16", "w9a16", "w16a16", "W4A16", "fp8", "int4", "", "w4a16 "])
def test_unknown_name_lists_the_legal_ones(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))) as error:
        get_format(name)
    for legal in (*FORMAT_NAMES, "w3a16, w2a16", "w5a16, w6a16, w7a16"):
        assert legal in str(error.value)


def test_every_illegal_option_is_listed_with_its_legal_values():
    with pytest.raises(ValueError, match=r"'w4a16' cannot take") as error:
        get_format("w4a16", group_size=48, scale_convention="symmetric")
    message = str(error.value)
    assert "group_size=48 (legal for w4a16: 128, 64, 32)" in message
    assert "scale_convention='symmetric' (legal: narrow_range, full_range, clipped_range)" in message


@pytest.mark.parametrize("group_size", [0, -128, 64, 32, 256])
def test_w4a8_takes_only_groups_of_128(group_size):
    with pytest.raises(ValueError, match=rf"group_size={group_size} \(legal for w4a8: 128\)"):
        get_format("w4a8", group_size=group_size)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "int8", "nvfp4", "bf16"])
def test_formats_without_groups_refuse_integer_options(name):
    with pytest.raises(ValueError, match="takes no group_size=128, scale_convention=full_range") as error:
        get_format(name, group_size=128, scale_convention="full_range")
    assert "w4a16, w4a8" in str(error.value)
    with pytest.raises(ValueError, match="takes no group_size=128: only") as error:
        get_format(name, group_size=128)
    assert ("its groups are always of 16" in str(error.value)) == (name == "nvfp4")


# Integer: an int32 word holds 32 // bits codes, and a group shares 16 bits of scale.
#   w4, g128: 32 / 8 + 16 / 128 = 4.125;  w4, g32: 4 + 0.5 = 4.5;  w3 and w2 are stored as w4, g64: 4 + 0.25
#   w5, g128: 32 / 6 + 0.125 = 5.45833..;  w8, g128: 32 / 4 + 0.125
# fp8_block: 32 bits of scale for 16384 weights = 0.001953125. nvfp4: 8 bits for 16 weights.
@pytest.mark.parametrize(
    ("name", "group_size", "expected"),
    [
        ("w4a16", None, 4.125),
        ("w4a8", None, 4.125),
        ("w4a16", 32, 4.5),
        ("w2a16", None, 4.125),
        ("w3a16", 64, 4.25),
        ("w5a16", None, 5.125),
        ("w8a16", None, 8.125),
        ("fp8_block", None, 8.001953125),
        ("fp8_channel", None, 8.0),
        ("int8", None, 8.0),
        ("nvfp4", None, 4.5),
        ("bf16", None, 16.0),
    ],
)
def test_bits_per_weight(name, group_size, expected):
    assert get_format(name, group_size=group_size).bits_per_weight == pytest.approx(expected, rel=1e-12)


def test_formats_are_values():
    assert get_format("w4a16") == get_format("w4a16", group_size=128, scale_convention="full_range")
    assert len({get_format("w4a16"), get_format("w4a16", group_size=128), get_format("w4a8")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_format("w4a16").group_size = 64


def test_a_kernel_for_experts_alone_serves_nothing_beside_them():
    served = get_format("fp8_block").served_on("cpu")
    assert served.serves(128, ("experts",))
    assert not served.serves(128, ("experts", "attention"))


def test_group_sizes_of_a_device_ascend():
    assert get_format("w4a16").served_on("cuda").group_sizes == (32, 64, 128)
