"""int4 experts on few rows: the reference against plain products, the kernel against the reference."""

import re

import pytest
import torch
import torch.utils.cpp_extension

from qarl_kernels.decode_experts import SortedRows, decode_experts, unpack_marlin
from qarl_kernels.integer import dequantize_integer, quantize_integer
from qarl_kernels.ops.decode_experts import decode_config, decode_kernel
from support.asserts import assert_bitwise_equal, assert_snr
from support.marlin import pack_marlin, sort_rows

T, TOP_K, E = 11, 3, 5
# K, N, group: both GEMMs of Qwen3-30B-A3B, of a half of it on each of two GPUs, other groups, K of no whole 128.
SHAPES = [(2048, 1536, 128), (768, 2048, 128), (384, 192, 128), (512, 64, 64), (256, 128, 32), (192, 64, 64)]
on_gpu = pytest.mark.gpu


class Case:
    """Routed rows of which expert 2 has none, and expert 0 more than a block."""

    def __init__(self, k, n, group, *, exact=False, device="cpu"):
        torch.manual_seed(0)
        if exact:
            # Sums of small integers times powers of two have no rounding, whatever their order.
            self.codes = torch.randint(-8, 8, (E, n, k), dtype=torch.int8)
            self.scale = torch.exp2(torch.randint(-2, 3, (E, n, k // group)).float()).bfloat16()
            x = torch.randint(-4, 5, (T * TOP_K, k)).bfloat16()
        else:
            self.codes, self.scale = quantize_integer(torch.randn(E, n, k) / k**0.5, 4, group, "clipped_range")
            x = torch.randn(T * TOP_K, k).bfloat16()
        words, scale = pack_marlin(self.codes, self.scale)
        index = torch.tensor([[0, 1 + token % 2 * 2, 4] for token in range(T)])
        self.index, self.weight = index.to(device), torch.rand(T * TOP_K).to(device)
        self.x, self.words, self.marlin_scale = x.to(device), words.to(device), scale.to(device)
        self.rows = sort_rows(self.index, E)

    def run(self, top_k=TOP_K, weight=None, **other):
        x = self.x[: T * TOP_K // top_k].contiguous()
        tensors = {"words": self.words, "scale": self.marlin_scale, "rows": self.rows} | other
        return decode_experts(x, top_k=top_k, weight=weight, **tensors)

    def on_cpu(self, top_k=TOP_K, weight=None):
        rows = SortedRows(*(tensor.cpu() for tensor in self.rows))
        x, words, scale = (tensor.cpu() for tensor in (self.x[: T * TOP_K // top_k], self.words, self.marlin_scale))
        return decode_experts(x, words, scale, rows, top_k, None if weight is None else weight.cpu())


@pytest.mark.parametrize(("k", "n", "group"), SHAPES[2:])
def test_weights_come_back_from_marlins_order(k, n, group):
    case = Case(k, n, group)
    codes, scale = unpack_marlin(case.words, case.marlin_scale)
    assert_bitwise_equal(codes, case.codes)
    assert_bitwise_equal(scale, case.scale)


def test_the_reference_is_each_rows_product_with_its_expert():
    case = Case(256, 128, 32, exact=True)
    weights = dequantize_integer(case.codes, case.scale).float()
    expected = torch.stack([case.x[i // TOP_K].float() @ weights[e].mT for i, e in enumerate(case.index.flatten())])
    assert_bitwise_equal(case.run(), expected.bfloat16())
    weighted = expected.bfloat16() * case.weight.bfloat16().unsqueeze(-1)
    assert_bitwise_equal(case.run(weight=case.weight), weighted)


def test_rows_of_no_expert_keep_what_was_there():
    case = Case(256, 128, 32)
    experts = torch.where(case.rows.experts == 4, -1, case.rows.experts)
    out = torch.full((T * TOP_K, 128), 7.0, dtype=torch.bfloat16)
    found = case.run(rows=case.rows._replace(experts=experts), out=out)
    elsewhere = case.index.flatten() == 4
    assert bool((found[elsewhere] == 7).all())
    assert_bitwise_equal(found[~elsewhere], case.run()[~elsewhere])


def test_tensors_that_do_not_belong_together_are_all_named():
    case = Case(256, 128, 32)
    strided = torch.zeros(T * TOP_K, 256, dtype=torch.bfloat16)[:, ::2]
    with pytest.raises(ValueError, match="decode_experts") as refused:
        case.run(scale=case.marlin_scale.float()[:, :, :64], weight=case.weight[1:], out=strided)
    assert str(refused.value).split(": ", 1)[1].split("; ") == [
        "scale is torch.float32 [5, 8, 64] (legal: torch.bfloat16 [5, 8, 128])",
        "weight is torch.float32 [32] (legal: torch.float32, 33 in all)",
        "scale is not contiguous",
        "out is not contiguous",
    ]


@on_gpu
@pytest.mark.parametrize(("k", "n", "group"), SHAPES)
@pytest.mark.parametrize("top_k", [TOP_K, 1])
def test_the_kernel_has_the_references_bits_where_sums_are_exact(k, n, group, top_k):
    case = Case(k, n, group, exact=True, device="cuda")
    for weight in (None, case.weight):
        assert_bitwise_equal(case.run(top_k, weight).cpu(), case.on_cpu(top_k, weight))


@on_gpu
@pytest.mark.parametrize(("k", "n", "group"), SHAPES)
def test_the_kernel_sums_as_well_as_the_reference(k, n, group):
    case = Case(k, n, group, device="cuda")
    expected = case.on_cpu()
    assert_snr(case.run(), expected, 70)
    broken = case.words.clone()
    broken[:, 0] ^= 8
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(case.run(words=broken), expected, 70)


@on_gpu
def test_a_rows_result_does_not_depend_on_the_others():
    case = Case(2048, 1536, 128, device="cuda")
    whole = case.run()
    alone = SortedRows(*sort_rows(torch.where(case.index == 1, 1, E), E))
    rows = (case.index == 1).flatten()
    assert_bitwise_equal(case.run(rows=alone)[rows], whole[rows])


@on_gpu
def test_the_kernel_runs_in_a_graph():
    case = Case(768, 2048, 128, device="cuda")
    expected, out = case.run(), torch.zeros(T * TOP_K, 2048, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(out=out)
    graph.replay()
    assert_bitwise_equal(out, expected)


@on_gpu
def test_the_kernel_is_compiled_without_a_toolkit(monkeypatch):
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    config = decode_config(1024, 64, 128)
    assert config is not None
    assert decode_kernel.__wrapped__(config, 0) is not None
    assert torch.utils.cpp_extension.CUDA_HOME is None


@pytest.mark.parametrize(("k", "n", "group"), [(2048, 1536, 16), (2048, 96, 128), (100, 64, 32), (11 * 128, 64, 128)])
def test_other_sizes_are_left_to_marlin(k, n, group):
    assert decode_config(k, n, group) is None


@on_gpu
def test_sizes_that_the_kernel_does_not_take_are_refused_with_the_legal_ones():
    case = Case(11 * 128, 64, 128, device="cuda")
    with pytest.raises(ValueError, match=re.escape("K=1408, N=64 in 11 groups on ")):
        case.run()
