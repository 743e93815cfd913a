"""Warp-specialised FP8 grouped GEMMs against float64; Gluon has no interpreter, so all but the checks need sm_90."""

from itertools import pairwise

import pytest
import torch

from qarl_formats import FP8_BLOCK
from qarl_kernels.fp8 import expand_block_scale
from qarl_kernels.ops.grouped_gemm import grouped_gemm_channel
from qarl_kernels.ops.hopper_fp8 import (
    hopper_grouped_gemm_fp8_block,
    hopper_grouped_gemm_fp8_channel,
)
from support.asserts import assert_bitwise_equal, assert_snr

MIN_DB = 45
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.0")]
needs_hopper = [pytest.param(name, marks=hopper) for name in ("channel", "block")]
# Rows per expert (empty ones first, inside and last; below, at and past a tile), N, K.
SHAPES = [([300], 256, 256), ([0, 100, 0, 617, 128, 1, 0], 512, 768), ([64, 65, 2500, 191], 384, 128)]
GEMMS = {"channel": hopper_grouped_gemm_fp8_channel, "block": hopper_grouped_gemm_fp8_block}


def operands(counts, n, k, kind, device="cuda"):
    """Random codes with scales of many sizes: a8, a_scale, w8, w_scale, offsets."""
    rows, experts = sum(counts), len(counts)
    scales = ((rows, k // 128), (experts, n // 128, k // 128)) if kind == "block" else ((rows, 1), (experts, n, 1))
    a_scale, w_scale = (torch.exp2(torch.randint(-6, 2, shape) + torch.rand(shape)) for shape in scales)
    a8, w8 = (
        (100 * torch.randn(shape)).clamp(-448, 448).to(torch.float8_e4m3fn) for shape in ((rows, k), (experts, n, k))
    )
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return [tensor.to(device) for tensor in (a8, a_scale, w8, w_scale, offsets)]


def reference(a8, a_scale, w8, w_scale, offsets):
    """The product in float64."""
    a, w = a8.double(), w8.double()
    if w_scale.shape[1] * FP8_BLOCK == w.shape[1]:
        a = a * a_scale.double().repeat_interleave(FP8_BLOCK, 1)
        w = w * expand_block_scale(w_scale.double(), *w.shape[-2:])
    else:
        a, w = a * a_scale.double(), w * w_scale.double()
    bounds = offsets.tolist()
    return torch.cat([a[start:stop] @ w[e].T for e, (start, stop) in enumerate(pairwise(bounds))])


@pytest.mark.parametrize("kind", needs_hopper)
@pytest.mark.parametrize(("counts", "n", "k"), SHAPES)
def test_matches_float64(kind, counts, n, k, poisoned_empty):
    arguments = operands(counts, n, k, kind)
    expected = reference(*arguments)
    assert_snr(GEMMS[kind](*arguments), expected, MIN_DB)
    for wrong in (1, 3):
        changed = list(arguments)
        changed[wrong] = arguments[wrong].roll(1, dims=-1 if kind == "block" and k > FP8_BLOCK else -2)
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(GEMMS[kind](*changed), expected, MIN_DB)


@pytest.mark.parametrize("kind", needs_hopper)
def test_long_sums_of_many_experts(kind, poisoned_empty):
    counts = torch.randint(0, 300, (130,)).tolist()
    arguments = operands(counts, 1536, 2048, kind)
    expected = reference(*arguments)
    assert_snr(GEMMS[kind](*arguments), expected, MIN_DB)
    shifted = arguments[4] - (arguments[4] > 0).int()
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(GEMMS[kind](*arguments[:4], shifted)[:-1], expected[:-1], MIN_DB)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("multiply", [hopper_grouped_gemm_fp8_channel, grouped_gemm_channel])
def test_the_two_scales_multiply_in_the_stated_order(multiply):
    a8, a_scale, w8, w_scale, offsets = operands([1000, 1000], 1024 + 128, 256, "channel")
    # One product a sum, so that the sum is exact and the order of the scales alone decides.
    a8 = (a8.float() * (torch.arange(256, device="cuda") == 7)).to(torch.float8_e4m3fn)
    product = reference(a8, torch.ones_like(a_scale), w8, torch.ones_like(w_scale), offsets).float()
    columns = w_scale.squeeze(-1).repeat_interleave(1000, 0)
    token_first = (columns * (a_scale * product)).to(torch.bfloat16)
    channel_first = (a_scale * (columns * product)).to(torch.bfloat16)
    assert_bitwise_equal(multiply(a8, a_scale, w8, w_scale, offsets), token_first)
    assert_bitwise_equal(multiply(a8, a_scale, w8, w_scale, offsets, channel_first=True), channel_first)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(token_first, channel_first)
    bias = (100 * torch.randn(w8.shape[1], device="cuda")).bfloat16()
    biased = (a_scale.double() * (columns * product).double() + bias.double()).float().to(torch.bfloat16)
    assert_bitwise_equal(multiply(a8, a_scale, w8, w_scale, offsets, channel_first=True, bias=bias), biased)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(channel_first + bias, biased)


@pytest.mark.parametrize("kind", needs_hopper)
def test_every_run_gives_the_same_bits(kind):
    arguments = operands([1000, 3000, 37], 1536, 2048, kind)
    first = GEMMS[kind](*arguments)
    for _ in range(20):
        assert_bitwise_equal(GEMMS[kind](*arguments), first)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.0")
def test_row_weight_multiplies_the_accumulator(poisoned_empty):
    arguments = operands([70, 200], 256, 512, "block")
    weight = torch.rand(270, device="cuda")
    expected = reference(*arguments) * weight.double()[:, None]
    assert_snr(hopper_grouped_gemm_fp8_block(*arguments, row_weight=weight), expected, MIN_DB)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(hopper_grouped_gemm_fp8_block(*arguments, row_weight=weight.roll(1)), expected, MIN_DB)


@pytest.mark.parametrize("kind", needs_hopper)
def test_no_rows(kind):
    assert GEMMS[kind](*operands([0, 0], 256, 256, kind)).shape == (0, 256)


@pytest.mark.parametrize("kind", needs_hopper)
def test_compiles_and_is_captured(kind):
    arguments = operands([40, 90], 256, 256, kind)
    expected = GEMMS[kind](*arguments)
    assert_bitwise_equal(torch.compile(GEMMS[kind], fullgraph=True)(*arguments), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = GEMMS[kind](*arguments)
    captured.zero_()
    graph.replay()
    assert_bitwise_equal(captured, expected)


def test_refuses_what_it_cannot_multiply():
    arguments = operands([3, 5], 256, 256, "block", device="cpu")
    with pytest.raises(ValueError, match=r"a8 is on cpu \(legal: cuda"):
        hopper_grouped_gemm_fp8_block(*arguments)
