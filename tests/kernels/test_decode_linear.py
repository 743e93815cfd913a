"""A dense int4 layer on few rows: the reference against plain products, the kernel against the reference."""

import re

import pytest
import torch

from qarl_kernels.decode_linear import decode_linear
from qarl_kernels.integer import dequantize_integer, quantize_integer
from qarl_kernels.ops.decode_linear import linear_config
from support.asserts import assert_bitwise_equal, assert_snr
from support.marlin import pack_marlin

# K, N, group: both projections of Qwen3-30B-A3B, of a half of it on each of two GPUs; clusters of 1 to 8 blocks,
# several groups in a slice and several slices in a group.
SHAPES = [(2048, 5120, 128), (4096, 2048, 128), (2048, 2048, 128), (1536, 256, 128), (512, 256, 32), (256, 128, 64)]
# Rows at, below and above those that the kernel is compiled for.
COUNTS = (1, 7, 8, 9, 16, 27, 32)
on_gpu = pytest.mark.gpu


class Case:
    """A weight, and rows enough for any count."""

    def __init__(self, k, n, group, *, exact=False, device="cpu"):
        torch.manual_seed(0)
        if exact:
            # Sums of small integers times powers of two have no rounding, whatever their order.
            codes = torch.randint(-8, 8, (1, n, k), dtype=torch.int8)
            scale = torch.exp2(torch.randint(-2, 3, (1, n, k // group)).float()).bfloat16()
            x = torch.randint(-4, 5, (33, k)).bfloat16()
        else:
            codes, scale = quantize_integer(torch.randn(1, n, k) / k**0.5, 4, group, "clipped_range")
            x = torch.randn(33, k).bfloat16()
        self.weight = dequantize_integer(codes, scale)[0]
        words, marlin_scale = pack_marlin(codes, scale)
        self.x, self.words, self.scale = x.to(device), words[0].to(device), marlin_scale[0].to(device)

    def run(self, count, **other):
        tensors = {"x": self.x[:count], "words": self.words, "scale": self.scale} | other
        return decode_linear(**tensors)

    def on_cpu(self, count):
        return decode_linear(self.x[:count].cpu(), self.words.cpu(), self.scale.cpu())


def test_the_reference_is_the_rows_product_with_the_weight():
    case = Case(256, 128, 64, exact=True)
    assert_bitwise_equal(case.run(5), (case.x[:5].float() @ case.weight.float().mT).bfloat16())


def test_tensors_that_do_not_belong_together_are_all_named():
    case = Case(256, 128, 64)
    strided = torch.zeros(33, 256, dtype=torch.bfloat16)[:, ::2]
    with pytest.raises(ValueError, match="decode_linear") as refused:
        case.run(33, scale=case.scale.float()[:, :64].contiguous(), out=strided)
    assert str(refused.value).split(": ", 1)[1].split("; ") == [
        "scale is torch.float32 [4, 64] (legal: torch.bfloat16 [4, 128])",
        "x has 33 rows (legal: 1 to 32)",
        "out is not contiguous",
    ]
    shifted = torch.empty(256 + 1, dtype=torch.bfloat16)[1:].view(1, 256)
    with pytest.raises(ValueError, match="x begins at an address that is no multiple of 16"):
        case.run(1, x=shifted)
    with pytest.raises(ValueError, match=re.escape("x has 0 rows (legal: 1 to 32)")):
        case.run(0)


@pytest.mark.parametrize(
    ("k", "n", "group"), [(2048, 5120, 16), (2048, 5184, 128), (896, 1152, 128), (100, 128, 32), (40960, 128, 128)]
)
def test_other_sizes_are_left_to_marlin(k, n, group):
    assert linear_config(k, n, group, 32) is None


@pytest.mark.parametrize(("k", "n", "group"), SHAPES)
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_slices_share_k_evenly_and_copies_fit_a_block(k, n, group, rows):
    config = linear_config(k, n, group, rows)
    assert config is not None
    codes = k // (config.CLUSTER * config.WARPS // config.TILES)
    assert codes * config.CLUSTER * config.WARPS // config.TILES == k
    assert codes % group == 0 or group % codes == 0
    assert codes // 16 % config.CHUNK == 0
    assert codes // 16 // config.CHUNK <= 4
    assert config.shared_bytes <= 227 << 10


@on_gpu
@pytest.mark.parametrize(("k", "n", "group"), SHAPES)
def test_the_kernel_has_the_references_bits_where_sums_are_exact(k, n, group):
    case = Case(k, n, group, exact=True, device="cuda")
    for count in COUNTS:
        out = torch.full((count + 1, n), 7.0, device="cuda", dtype=torch.bfloat16)
        case.run(count, out=out[:count])
        assert_bitwise_equal(out[:count].cpu(), case.on_cpu(count))
        assert bool((out[count] == 7).all())


@on_gpu
@pytest.mark.parametrize(("k", "n", "group"), SHAPES)
@pytest.mark.parametrize("count", [3, 32])
def test_the_kernel_sums_as_well_as_the_reference(k, n, group, count):
    case = Case(k, n, group, device="cuda")
    expected = case.on_cpu(count)
    assert_snr(case.run(count), expected, 70)
    broken = case.words.clone()
    broken[0] ^= 8
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(case.run(count, words=broken), expected, 70)


@on_gpu
@pytest.mark.parametrize("count", [8, 32])
def test_a_rows_result_depends_neither_on_the_others_nor_on_the_run(count):
    case = Case(2048, 5120, 128, device="cuda")
    whole = case.run(count)
    others = case.x[:count].flip(0).contiguous()
    assert_bitwise_equal(case.run(count, x=others).flip(0), whole)
    for _ in range(50):
        assert_bitwise_equal(case.run(count), whole)


@on_gpu
def test_the_kernel_runs_in_a_graph():
    case = Case(4096, 2048, 128, device="cuda")
    expected, out = case.run(17), torch.zeros(17, 2048, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            case.run(17, out=out)
    graph.replay()
    assert_bitwise_equal(out, expected)


@on_gpu
def test_sizes_that_the_kernel_does_not_take_are_refused_with_the_legal_ones():
    case = Case(896, 128, 128, device="cuda")
    with pytest.raises(ValueError, match=re.escape("K=896, N=128 in 7 groups on ")):
        case.run(1)
