import pytest
import torch

from qarl_kernels import get_format, quantize_weight
from qarl_kernels.integer import pack_int32
from qarl_nemo.refit.flips import _SAMPLE_BYTES, FlippedCodes

UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def published(codes, scale, owner=UP, num_bits=4):
    return {f"{owner}.weight_packed": pack_int32(codes, num_bits), f"{owner}.weight_scale": scale}


def figures(flips, *layers):
    assert list(flips.watch(iter(layers))) == list(layers)
    return flips.figures()


@pytest.fixture
def codes():
    return torch.randint(-8, 8, (2, 16, 64), dtype=torch.int8)


@pytest.mark.parametrize(("name", "num_bits"), [("w4a16", 4), ("w2a16", 4), ("w8a16", 8), ("w5a16", 5)])
def test_flips_by_hand(codes, name, num_bits):
    # 2 x 16 x 64 = 2048 codes and 64 scales in gate and up, 16 x 64 = 1024 and 32 in down. Three of the former move,
    # one of the latter, and one scale: (3 + 1) / 3072, 3 / 2048, 1 / 1024, 1 / 96. The last code of a row is the tail
    # of a word of w5a16, in which only four of six lanes are used.
    flips, scale = FlippedCodes(get_format(name, group_size=32)), torch.ones(2, 16, 2).bfloat16()
    down, down_scale = codes[0].clone(), scale[0].clone()
    before = published(codes, scale, UP, num_bits) | published(down, down_scale, DOWN, num_bits)
    assert figures(flips, before) == {}
    for place in ((0, 0, 0), (0, 0, 1), (1, 15, 63)):
        codes[place] = -codes[place] - 1
    down[3, 5] = -down[3, 5] - 1
    down_scale[3, 1] = 2
    after = published(codes, scale, UP, num_bits) | published(down, down_scale, DOWN, num_bits)
    expected = {"codes": 4 / 3072, "codes_in": 3 / 2048, "codes_out": 1 / 1024, "scales": 1 / 96}
    assert figures(flips, after) == pytest.approx({f"flipped_{kind}": share for kind, share in expected.items()})
    assert set(figures(flips, after).values()) == {0.0}


def test_a_step_is_compared_once_however_often_it_is_published(codes):
    """Engines are refitted before a validation and after it; an update that was skipped has moved nothing."""
    flips, scale = FlippedCodes(get_format("w4a16", group_size=32)), torch.ones(2, 16, 2).bfloat16()

    def publish(step):
        layers = [published(codes, scale)]
        assert list(flips.watch_step(step, iter(layers))) == layers
        return flips.figures().get("flipped_codes")

    assert publish(1) is None
    codes[0, 0, 0] = -codes[0, 0, 0] - 1
    assert publish(2) == publish(2) == pytest.approx(1 / 2048)
    assert publish(3) == 0.0


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block", "int8"])
def test_values_of_one_byte_are_codes(name):
    fmt, weight = get_format(name), torch.randn(128, 256)
    flips = FlippedCodes(fmt)
    layers = []
    for sign in (1, -1):
        weight[7, 9] *= sign
        stored = quantize_weight(weight, fmt).tensors
        layers.append({f"{UP}.{suffix}": tensor for suffix, tensor in stored.items()})
    norm = {"model.layers.0.input_layernorm.weight": torch.ones(4)}
    assert figures(flips, layers[0] | norm) == {}
    share = 1 / (128 * 256)
    assert figures(flips, layers[1] | norm) == {"flipped_codes": share, "flipped_codes_in": share, "flipped_scales": 0}


def test_nvfp4_has_two_codes_a_byte_and_scales_of_one():
    weight, layers, flips = torch.randn(64, 256), [], FlippedCodes(get_format("nvfp4"))
    weight[0, :2] = torch.tensor([9.0, 5.0])
    weight[1, :16] /= 2 * weight[1, :16].abs().max()
    for change in (1, 2):
        # A sign beside the largest weight, and a group of twice the size, whose codes stay.
        weight[0, 1] *= -1
        weight[1, :16] *= change
        stored = quantize_weight(weight, get_format("nvfp4")).tensors
        layers.append({f"{UP}.{suffix}": tensor for suffix, tensor in stored.items()})
    assert figures(flips, layers[0]) == {}
    # One of 64 x 256 codes, and one of 64 x 16 scales and the tensor's own.
    share = 1 / (64 * 256)
    expected = {"flipped_codes": share, "flipped_codes_in": share, "flipped_scales": 1 / (64 * 16 + 1)}
    assert figures(flips, layers[1]) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(64, 256), (2, 64, 256)])
def test_nvfp4s_scale_of_a_whole_tensor_is_a_scale(shape):
    """All that is served changes with it, though neither a code nor a scale of a group does."""
    stored = quantize_weight(torch.randn(shape), get_format("nvfp4")).tensors
    flips, layer = FlippedCodes(get_format("nvfp4")), {f"{UP}.{suffix}": tensor for suffix, tensor in stored.items()}
    divisor = stored["weight_global_scale"]
    assert figures(flips, layer) == {}
    moved = layer | {f"{UP}.weight_global_scale": divisor * (1 + 2**-20)}
    total = stored["weight_scale"].numel() + divisor.numel()
    expected = {"flipped_codes": 0, "flipped_codes_in": 0, "flipped_scales": divisor.numel() / total}
    assert figures(flips, moved) == pytest.approx(expected)


def test_many_layers_are_compared_in_one_go_and_counted_one_by_one(monkeypatch):
    comparisons = []
    shares = FlippedCodes._shares
    monkeypatch.setattr(FlippedCodes, "_shares", lambda *args: comparisons.append(args[1]) or shares(*args))
    flips, layers = FlippedCodes(get_format("w4a16", group_size=32)), []
    for number in range(6):
        codes, scale = torch.zeros(2, 16, 64, dtype=torch.int8), torch.ones(2, 16, 2).bfloat16()
        layers.append(published(codes, scale, UP.replace("0", str(number))))
    assert figures(flips, *layers) == {}
    layers[5] = published(torch.ones_like(codes), scale, UP.replace("0", "5"))
    assert figures(flips, *layers)["flipped_codes"] == pytest.approx(1 / 6)
    assert [kind.suffix for kind in comparisons] == ["weight_packed", "weight_scale"]


def test_updates_that_nobody_asked_about_are_compared_with_all_the_same(codes):
    flips, scale = FlippedCodes(get_format("w4a16", group_size=32)), torch.ones(2, 16, 2).bfloat16()
    list(flips.watch([published(codes, scale)]))
    codes[0, 0] = -codes[0, 0] - 1
    list(flips.watch([published(codes, scale)]))
    assert flips.figures()["flipped_codes"] == 64 / 2048
    list(flips.watch([published(codes, scale)]))
    codes[1, 1] = -codes[1, 1] - 1
    assert figures(flips, published(codes, scale))["flipped_codes"] == 64 / 2048
    # Asked again without another update, it answers the same.
    assert flips.figures()["flipped_codes"] == 64 / 2048


def test_bf16_has_no_codes():
    flips, layer = FlippedCodes(get_format("bf16")), {f"{UP}.weight": torch.ones(4, 32).bfloat16()}
    assert [figures(flips, layer), figures(flips, layer)] == [{}, {}]


def test_of_a_large_weight_a_part_is_remembered_that_stands_for_all():
    # 32 experts of 768 rows, of which an even step would meet the same rows: whole experts flip, and in the others the
    # first row.
    codes, scale = torch.zeros(32, 768, 256, dtype=torch.int8), torch.ones(32, 768, 2).bfloat16()
    flips = FlippedCodes(get_format("w4a16"))
    small, small_scale = codes[0].clone(), scale[0].clone()
    figures(flips, published(codes, scale) | published(small, small_scale, DOWN))
    remembered = flips._before[f"{UP}.weight_packed"].rows
    assert remembered.nbytes <= _SAMPLE_BYTES < 32 * 768 * 128
    codes[:, 0] = 1
    codes[::4] = 1
    small[:] = 1
    shares = figures(flips, published(codes, scale) | published(small, small_scale, DOWN))
    # 8 of 32 experts, and one row in 768 of the others: 0.251. One row more or less in a sample of 1891 is 0.0005.
    large = pytest.approx(0.25 + 0.75 / 768, abs=0.003)
    assert (shares["flipped_codes_in"], shares["flipped_codes_out"]) == (large, 1)
    # The small one is a 33rd of all, though more than a quarter of what is remembered.
    assert shares["flipped_codes"] == pytest.approx((32 * shares["flipped_codes_in"] + 1) / 33)


def test_a_copy_is_remembered(codes):
    flips, layer = FlippedCodes(get_format("w4a16", group_size=32)), published(codes, torch.ones(2, 16, 2).bfloat16())
    figures(flips, layer)
    layer[f"{UP}.weight_packed"].zero_()
    assert figures(flips, layer)["flipped_codes"] > 0.5


def test_weights_of_another_shape_are_not_compared(codes):
    flips = FlippedCodes(get_format("w4a16", group_size=32))
    figures(flips, published(codes, torch.ones(2, 16, 2).bfloat16()))
    assert figures(flips, published(codes[:1], torch.ones(1, 16, 2).bfloat16())) == {}


def test_only_codes_that_flip_for_the_engine_count(codes):
    flips = FlippedCodes(get_format("w4a16", group_size=32, nested_in="w8a16"))
    scale = torch.ones(2, 16, 2).bfloat16()
    fine = codes * 16
    assert figures(flips, published(fine, scale, UP, 8)) == {}
    # 7 steps of 256 are less than half a step of 16; 9 are more, towards zero so that no clamp is met.
    fine[0, 0] += 7 * (1 - 2 * (fine[0, 0] > 0).to(torch.int8))
    assert figures(flips, published(fine, scale, UP, 8))["flipped_codes"] == 0
    fine[1, 3] += 9 * (1 - 2 * (fine[1, 3] > 0).to(torch.int8))
    assert figures(flips, published(fine, scale, UP, 8))["flipped_codes"] == 64 / 2048


def test_another_grid_of_the_same_finer_codes_flips_by_its_own_steps():
    flips, scale = FlippedCodes(get_format("w4a16", group_size=32, nested_in="w8a16")), torch.ones(2, 16, 2).bfloat16()
    flips.enter(get_format("w2a16", group_size=32, nested_in="w8a16"))
    fine = torch.zeros(2, 16, 64, dtype=torch.int8)
    figures(flips, published(fine, scale, UP, 8))
    # Half a step of 4 bits is 8 of 256, and of 2 bits 32.
    fine[0, 0] = 9
    assert figures(flips, published(fine, scale, UP, 8))["flipped_codes"] == 0
    fine[0, 0] = 33
    assert figures(flips, published(fine, scale, UP, 8))["flipped_codes"] == 64 / 2048


def test_codes_of_two_grids_are_not_compared(codes):
    wide, narrow = (get_format(name, group_size=32) for name in ("w4a16", "w2a16"))
    flips, scale = FlippedCodes(wide), torch.ones(2, 16, 2).bfloat16()
    figures(flips, published(codes, scale))
    codes[0, 0] = -codes[0, 0] - 1
    assert figures(flips, published(codes, scale))["flipped_codes"] == 64 / 2048
    flips.enter(narrow)
    assert flips.figures() == {}
    # Most codes change with the grid, and none by a step.
    codes = codes.clamp(-2, 1)
    assert figures(flips, published(codes, scale)) == {}
    codes[1, 3] = -codes[1, 3] - 1
    assert figures(flips, published(codes, scale))["flipped_codes"] == 64 / 2048
