import pytest
import torch

from qarl_kernels.int8 import exact_product, quantize_channel, quantize_token
from support.asserts import assert_bitwise_equal

KINDS = pytest.mark.parametrize("dense", [True, False])


def test_channels_by_hand():
    # Row 0: amax 63.5, scale 0.5; 0.25 is half a step: to even, 0, and 0.75 to 2. Row 1: all zero, scale 1.
    weight = torch.tensor([[63.5, -63.5, 1.0, 0.25, 0.75, -0.25], [0.0, -0.0, 0.0, 0.0, 0.0, 0.0]])
    w8, scale = quantize_channel(weight)
    assert_bitwise_equal(scale, torch.tensor([[0.5], [1.0]]))
    assert w8.tolist() == [[127, -127, 2, 0, 2, 0], [0] * 6]


def test_no_code_is_below_minus_127():
    weight = torch.randn(64, 256) * torch.exp2(torch.randint(-120, 120, (64, 1)).float())
    w8, scale = quantize_channel(weight.bfloat16())
    assert (w8.int().abs().amax(-1) == 127).all()
    assert_bitwise_equal(quantize_channel(-weight.bfloat16())[0], -w8)
    assert_bitwise_equal(scale, weight.bfloat16().float().abs().amax(-1, keepdim=True) / torch.tensor(127.0))


def test_ties_go_to_even_in_dense_layers_and_away_from_zero_in_experts():
    # amax 127: codes are the numbers themselves.
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, -127.0]])
    assert quantize_token(x, dense=True)[0].tolist() == [[127, 0, 2, 2, 0, -2, 0, -127]]
    assert quantize_token(x, dense=False)[0].tolist() == [[127, 1, 2, 3, -1, -3, 0, -127]]


@KINDS
def test_a_token_is_multiplied_by_127_over_its_maximum(dense):
    x = torch.randn(64, 512).bfloat16()
    codes, scale = quantize_token(x, dense=dense)
    amax = x.float().abs().amax(-1, keepdim=True)
    assert_bitwise_equal(scale, amax / torch.tensor(127.0))
    factor = torch.full_like(amax, 127.0) / amax
    assert ((x.float() * factor).double() - codes.double()).abs().max() <= 0.5
    assert (codes.int().abs().amax(-1) == 127).all()


def test_only_experts_have_a_floor():
    # 2^-40 < 1e-10: 127 * 2^-40 / 1e-10 = 1.155.
    x = torch.zeros(2, 8)
    x[0, 3] = 2.0**-40
    codes, scale = quantize_token(x, dense=False)
    floor = torch.tensor(1e-10) / torch.tensor(127.0)
    assert_bitwise_equal(scale, torch.stack([floor, floor])[:, None])
    assert codes[:, 3].tolist() == [1, 0]
    codes, scale = quantize_token(x, dense=True)
    assert_bitwise_equal(scale, torch.tensor([[2.0**-40], [0.0]]) / torch.tensor(127.0))
    assert codes[:, 3].tolist() == [127, 0]


@KINDS
def test_a_broken_token_stays_visible_and_alone(dense):
    x = torch.randn(3, 128)
    x[1, 5] = torch.nan
    codes, scale = quantize_token(x, dense=dense)
    assert scale.isnan().flatten().tolist() == [False, True, False]
    assert (codes[[0, 2]].float() * scale[[0, 2]]).isfinite().all()
    assert [tuple(tensor.shape) for tensor in quantize_token(x[:0], dense=dense)] == [(0, 128), (0, 1)]


@pytest.mark.parametrize("columns", [16, 1024, 1040, 4096])
def test_sums_are_the_integers(columns):
    # Codes of one sign add up to more than 2^24 where there are more than 1040 columns.
    codes, weight = (torch.randint(100, 128, (size, columns)).float() for size in (5, 7))
    expected = (codes.long() @ weight.long().mT).float()
    assert_bitwise_equal(exact_product(codes, weight), expected)
    order = torch.randperm(columns)
    assert_bitwise_equal(exact_product(codes[:, order], weight[:, order]), expected)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(exact_product(codes, weight.flip(1)), expected)
