"""Weights half-way between two codes: seen where a checkpoint was on another grid once, and nowhere else."""

import pytest
import torch

from qarl_kernels import get_format
from qarl_nemo.layers import ties
from qarl_nemo.layers.ties import BY_CHANCE, tie_warning, tied_share
from qarl_nemo.layers.weight import AlignedWeight, MasterChanges


def on_five_bits(rows=512, columns=256) -> torch.Tensor:
    """Weights as a symmetric 5-bit format leaves them: steps of 1/16 of the largest of each 32."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(-15, 16, (rows, columns // 32, 32), generator=generator)
    steps[..., 0] = -16
    size = torch.rand((rows, columns // 32, 1), generator=generator) + 0.5
    return (steps * size * 2**-10).flatten(-2).to(torch.bfloat16)


def evenly_spread() -> torch.Tensor:
    return torch.randn(512, 256, generator=torch.Generator().manual_seed(2)) * 0.02


def w4a16(**options):
    return get_format("w4a16", group_size=32, **options)


@pytest.mark.parametrize("convention", ["narrow_range", "full_range", "clipped_range"])
def test_evenly_spread_weights_are_tied_by_chance(convention):
    assert tied_share([evenly_spread()], w4a16(scale_convention=convention)) == pytest.approx(BY_CHANCE, abs=0.025)


def test_half_the_steps_of_five_bits_are_between_codes_of_four():
    weight = on_five_bits()
    # The odd ones, but for those that BF16 rounds away from there.
    assert 0.35 < tied_share([weight], w4a16(scale_convention="clipped_range")) < 0.5
    assert tied_share([weight], w4a16(scale_convention="full_range")) < 0.05
    assert tied_share([weight], w4a16(scale_convention="clipped_range", nested_in="w8a16")) < 0.05


def test_a_largest_weight_that_no_code_lies_beyond_is_not_tied():
    weight, fmt = torch.full((1, 32), 0.25), w4a16(scale_convention="full_range")
    for largest, share in ((7.5, 0), (-7.5, 1 / 32)):
        weight[0, 0] = largest
        assert tied_share([weight], fmt) == share


def test_stacked_weights_count_like_their_parts():
    weight, fmt = on_five_bits(), w4a16(scale_convention="clipped_range")
    assert tied_share([weight.unflatten(0, (4, -1))], fmt) == tied_share([weight], fmt)
    mixed = tied_share([weight, evenly_spread()], fmt)
    assert mixed == pytest.approx((tied_share([weight], fmt) + tied_share([evenly_spread()], fmt)) / 2)


def test_of_large_weights_rows_from_end_to_end_are_counted(monkeypatch):
    fmt, half = w4a16(scale_convention="clipped_range"), torch.cat([on_five_bits(), evenly_spread().bfloat16()])
    whole = tied_share([half], fmt)
    monkeypatch.setattr(ties, "_SAMPLE", half.numel() // 8)
    # 128 of 1024 rows, 32768 weights; three standard deviations of their share are 0.008.
    assert tied_share([half], fmt) == pytest.approx(whole, abs=0.015)
    assert tied_share([half.unflatten(0, (4, -1))], fmt) == tied_share([half], fmt)


def aligned(weight, fmt):
    return AlignedWeight("layer", torch.nn.Parameter(weight), fmt, MasterChanges())


def test_the_warning_names_the_grid_the_cause_and_a_way_out():
    fmt = w4a16(scale_convention="clipped_range")
    wide = get_format("w8a16", group_size=32, scale_convention="clipped_range")
    told = tie_warning([aligned(on_five_bits(), fmt)], [wide, fmt])
    full = f"full_range has {tied_share([on_five_bits()], w4a16(scale_convention='full_range')):.1%}"
    for part in ("4 bits", "clipped_range, groups of 32", "3.1% would by chance", full, "qarl.nested_in"):
        assert part in told
    assert not tie_warning([aligned(on_five_bits(), wide)], [wide])
    assert not tie_warning([aligned(evenly_spread(), fmt)], [fmt])
    experts = [torch.nn.Parameter(weight) for weight in (evenly_spread(), on_five_bits())]
    assert tie_warning([AlignedWeight("experts", experts, fmt, MasterChanges())], [fmt])


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "nvfp4", "int8", "bf16"])
def test_other_formats_are_not_looked_at(name):
    assert not tie_warning([aligned(on_five_bits(), get_format(name))], [get_format(name)])


def test_nothing_trained_is_nothing_to_warn_of():
    empty = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
    fmt = w4a16(scale_convention="clipped_range")
    assert not tie_warning([AlignedWeight("layer", empty, fmt, MasterChanges())], [fmt])
    assert not tie_warning([], [fmt])
