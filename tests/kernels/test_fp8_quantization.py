import pytest
import torch

from qarl_kernels.fp8 import (
    cast_fp8,
    encode_int4_as_fp8,
    expand_block_scale,
    quantize_block,
    quantize_channel,
    quantize_group,
    quantize_token,
)
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import uneven_weight

E4M3 = torch.float8_e4m3fn
TOKEN_FLOOR = torch.tensor(1 / (448 * 512))
GROUP_FLOOR = torch.tensor(1e-10) / 448


def numbers(tensor):
    return tensor.float().flatten().tolist()


def test_casts_round_half_to_even_and_saturate():
    # E4M3 has 3 fraction bits: steps of 2 in [16, 32), of 2^-9 below 2^-6. 17 lies between 16 and 18, 19 between
    # 18 and 20 (even fraction), 2^-10 between 0 and 2^-9, 3 * 2^-10 between 2^-9 and 2^-8.
    values = [17.0, 19.0, 18.9, 2.0**-10, 3 * 2.0**-10, -17.0]
    assert numbers(cast_fp8(torch.tensor(values))) == [16.0, 20.0, 18.0, 0.0, 2.0**-8, -16.0]
    big = torch.tensor([448.0, 449.0, 480.0, 1e9, torch.inf])
    assert numbers(cast_fp8(torch.cat([big, -big]))) == [448.0] * 5 + [-448.0] * 5
    assert cast_fp8(torch.tensor([torch.nan])).float().isnan().all()
    assert_bitwise_equal(cast_fp8(torch.tensor([-0.0, 0.0])).view(torch.uint8), torch.tensor([0x80, 0]).byte())


def test_casts_choose_the_nearest_of_all_e4m3_numbers():
    # 1.f * 2^(e-7) for exponent bits e > 0, f * 2^-9 for e = 0; bits 0x7F are NaN. The index is the bit pattern.
    table = torch.tensor([(8 + f) / 8 * 2.0 ** (e - 7) if e else f * 2.0**-9 for e in range(16) for f in range(8)])
    table = table[:-1].double()
    values = torch.cat([torch.randn(500) * 2.0 ** torch.randint(-12, 9, (500,)), (table[1:] + table[:-1]).float() / 2])
    distance = (values.double().abs()[:, None] - table).abs()
    # Of two equally near neighbours the one with the even bit pattern: an odd pattern counts as a little farther.
    nearest = (distance + 1e-12 * (torch.arange(127) % 2)).argmin(-1)
    expected = (nearest + 128 * values.signbit()).byte()
    assert_bitwise_equal(cast_fp8(values).view(torch.uint8), expected)
    ties_away = (distance - 1e-12 * (torch.arange(127) % 2)).argmin(-1)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal((ties_away + 128 * values.signbit()).byte(), expected)


def test_channels_by_hand():
    # Row 0: amax 224, scale 0.5; 224 -> 448, -112 -> -224, 1 -> 2, 0.07 -> 0.14: steps of 2^-6, 8.96 of them -> 9.
    # Row 1: all zero, scale 1.
    weight = torch.tensor([[224.0, -112.0, 1.0, 0.07], [0.0, 0.0, -0.0, 0.0]])
    w8, scale = quantize_channel(weight)
    assert_bitwise_equal(scale, torch.tensor([[0.5], [1.0]]))
    assert numbers(w8[0]) == [448.0, -224.0, 2.0, 9 / 64]
    assert numbers(w8[1]) == [0.0] * 4


def test_blocks_by_hand_with_partial_edges():
    # 130 x 200 has 2 x 2 blocks, the lower ones 2 rows high, the right ones 72 columns wide.
    weight = torch.zeros(130, 200)
    weight[0, 0], weight[5, 100] = 448.0, 3.0
    weight[127, 128] = -896.0
    weight[129, 127] = 112.0
    w8, scale = quantize_block(weight)
    assert_bitwise_equal(scale, torch.tensor([[1.0, 2.0], [0.25, 1.0]]))
    assert (w8.shape, w8.dtype) == (weight.shape, E4M3)
    assert numbers(w8[[0, 5, 127, 129], [0, 100, 128, 127]]) == [448.0, 3.0, -448.0, 448.0]
    assert w8.float().count_nonzero() == 4
    expanded = expand_block_scale(scale, 130, 200)
    assert expanded.shape == (130, 200)
    assert (expanded[127, 127], expanded[127, 128], expanded[128, 127], expanded[128, 128]) == (1.0, 2.0, 0.25, 1.0)


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 128), (2, 130, 256)])
def test_blocks_are_torch_casts_block_by_block(shape):
    weight = torch.randn(shape) * torch.exp2(torch.randint(-6, 6, shape).float())
    w8, scale = quantize_block(weight)
    *batch, rows, columns = shape
    assert scale.shape == (*batch, -(-rows // 128), -(-columns // 128))
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            block = weight[..., row : row + 128, column : column + 128]
            block_scale = block.abs().amax((-2, -1)) / 448
            assert_bitwise_equal(scale[..., row // 128, column // 128], block_scale)
            expected = (block / block_scale[..., None, None]).clamp(-448, 448).to(E4M3)
            assert_bitwise_equal(w8[..., row : row + 128, column : column + 128], expected)


def test_channels_and_tokens_are_torch_casts_row_by_row():
    weight = torch.randn(16, 128) * torch.exp2(torch.randint(-6, 6, (16, 1)).float())
    for quantize in (quantize_channel, quantize_token):
        w8, scale = quantize(weight)
        assert_bitwise_equal(scale, weight.abs().amax(-1, keepdim=True) / 448)
        assert_bitwise_equal(w8, (weight / scale).clamp(-448, 448).to(E4M3))
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(w8, (weight / (scale * (1 + 2**-7))).clamp(-448, 448).to(E4M3))


def test_token_scales_have_a_floor():
    # amax 2^-10 / 448 = 2.2e-6 is under the floor 1 / 229376 = 4.4e-6, so a8 = 229376 / 1024 = 224, not 448.
    # amax 1 / 448 is above it. All zero: the floor.
    activations = torch.zeros(3, 128)
    activations[0, 3], activations[1, 3] = 2.0**-10, 1.0
    a8, scale = quantize_token(activations)
    assert_bitwise_equal(scale, torch.stack([TOKEN_FLOOR, torch.tensor(1 / 448), TOKEN_FLOOR])[:, None])
    assert numbers(a8[:, 3]) == [224.0, 448.0, 0.0]
    assert a8.float().count_nonzero() == 2


def test_group_scales_have_the_floor_of_their_kernel():
    # Groups: amax 1; amax 2^-40 < 1e-10; all zero.
    activations = torch.zeros(1, 384)
    activations[0, 0], activations[0, 128] = -1.0, 2.0**-40
    a8, scale = quantize_group(activations)
    assert_bitwise_equal(scale, torch.stack([torch.tensor(1 / 448), GROUP_FLOOR, GROUP_FLOOR])[None])
    # 2^-40 * 448 / 1e-10 = 4.0746, steps of 0.5: 4.
    assert numbers(a8[0, [0, 128, 256]]) == [-448.0, 4.0, 0.0]
    a8, scale = quantize_group(activations, after_swiglu=True)
    assert_bitwise_equal(scale, torch.stack([torch.tensor(1 / 448), TOKEN_FLOOR, TOKEN_FLOOR])[None])
    assert numbers(a8[0, [0, 128, 256]]) == [-448.0, 0.0, 0.0]


def test_groups_are_quantized_one_by_one():
    activations = torch.randn(4, 256) * torch.tensor([1.0, 100.0]).repeat_interleave(128)
    a8, scale = quantize_group(activations)
    for group in range(2):
        columns = slice(128 * group, 128 * (group + 1))
        alone, alone_scale = quantize_token(activations[:, columns])
        assert_bitwise_equal(a8[:, columns], alone)
        assert_bitwise_equal(scale[:, group : group + 1], alone_scale)


@pytest.mark.parametrize("quantize", [quantize_token, quantize_group])
def test_a_broken_token_stays_visible_and_alone(quantize):
    activations = torch.randn(3, 128)
    activations[1, 5] = torch.nan
    a8, scale = quantize(activations)
    values = a8.float() * scale
    assert values[1].isnan().any()
    assert values[[0, 2]].isfinite().all()


def test_bf16_activations_are_divided_in_fp32():
    activations = torch.randn(4, 128).bfloat16()
    for quantize in (quantize_token, quantize_group):
        for ours, expected in zip(quantize(activations), quantize(activations.float()), strict=True):
            assert_bitwise_equal(ours, expected)


def test_no_tokens():
    assert [tuple(tensor.shape) for tensor in quantize_token(torch.zeros(0, 256))] == [(0, 256), (0, 1)]
    assert [tuple(tensor.shape) for tensor in quantize_group(torch.zeros(0, 256))] == [(0, 256), (0, 2)]


def test_a_swapped_block_scale_is_noticed():
    weight = uneven_weight(256, 256).float()
    w8, scale = quantize_block(weight * torch.tensor([1.0, 4.0]).repeat_interleave(128))
    rebuilt = lambda chosen: w8.float() * expand_block_scale(chosen, 256, 256)  # noqa: E731
    expected = weight * torch.tensor([1.0, 4.0]).repeat_interleave(128)
    assert_snr(rebuilt(scale), expected, 28)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(rebuilt(scale.mT), expected, 28)


def test_int4_as_fp8_by_hand():
    # Two groups with scales 1/2 and 1/8: channel scale (1/2) / 448; the scales over it, 448 and 112, are E4M3, and
    # so are their eighths 56 and 14; the channel scale times 8 is 1 / 112.
    #   group 0: -8 * 56 = -448;  7 * 56 = 392 -> 384 (steps of 32);  3 * 56 = 168 -> 160 (steps of 16, a tie, even)
    #   group 1:  5 * 14 = 70 -> 72 (steps of 8);  -1 * 14 = -14
    codes = torch.zeros(1, 64, dtype=torch.int8)
    codes[0, :3] = torch.tensor([-8, 7, 3])
    codes[0, 32:34] = torch.tensor([5, -1])
    w8, channel_scale = encode_int4_as_fp8(codes, torch.tensor([[0.5, 0.125]]).bfloat16())
    assert_bitwise_equal(channel_scale, torch.tensor([[0.5]]) / 448 * 8)
    assert channel_scale.item() == pytest.approx(1 / 112, rel=1e-7)
    assert numbers(w8[0, [0, 1, 2, 3, 32, 33, 34]]) == [-448.0, 384.0, 160.0, 0.0, 72.0, -14.0, 0.0]


def test_int4_as_fp8_rounds_scales_twice():
    # The second scale over the channel scale is 448 * 1.34375 * 2^-13 = 9.40625 * 2^-7, in steps of 2^-7 there: 9.
    # An eighth of that is 4.5 * 2^-9, in steps of 2^-9: a tie, 4. (Rounded once, 4.703 * 2^-9 would be 5.)
    # The code 7 is then 28 * 2^-9; rounded once, 35 * 2^-9 would be 9 * 2^-7.
    scale = torch.tensor([[1.0, 1.34375 * 2.0**-13]]).bfloat16()
    w8, _ = encode_int4_as_fp8(torch.full((1, 64), 7, dtype=torch.int8), scale)
    assert numbers(w8[0, [0, 63]]) == [384.0, 28 * 2.0**-9]


def test_int4_as_fp8_has_a_floor():
    # 2^-18 / 448 = 8.5e-9 is under 1 / 229376; 2^-18 * 229376 = 0.875, an eighth 0.109375 = 1.75 * 2^-4: exact.
    w8, channel_scale = encode_int4_as_fp8(torch.ones(1, 32, dtype=torch.int8), torch.tensor([[2.0**-18]]).bfloat16())
    assert_bitwise_equal(channel_scale, TOKEN_FLOOR.view(1, 1) * 8)
    assert numbers(w8[0, :1]) == [0.109375]
    assert (w8.double() * channel_scale.double())[0, 0].item() == pytest.approx(2.0**-18, rel=1e-6)


def test_int4_as_fp8_keeps_the_weight_to_fp8_precision():
    codes = torch.randint(-8, 8, (32, 256), dtype=torch.int8)
    scale = (torch.rand(32, 2) + 0.5).bfloat16()
    w8, channel_scale = encode_int4_as_fp8(codes, scale)
    expected = codes.double() * scale.double().repeat_interleave(128, -1)
    # The largest product is 8 * 448 / 8: nothing saturates.
    assert w8.float().abs().max() <= 448
    assert_snr(w8.double() * channel_scale.double(), expected, 28)
    for wrong in (scale.flip(-1), scale.flip(0)):
        wrong_w8, wrong_scale = encode_int4_as_fp8(codes, wrong)
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(wrong_w8.double() * wrong_scale.double(), expected, 28)
