from dataclasses import replace

import pytest
import torch

from qarl_kernels import fp8
from qarl_kernels.ops import launch
from qarl_kernels.ops.grouped_gemm import (
    grouped_gemm_bf16,
    grouped_gemm_channel,
    grouped_gemm_fp8_block,
    launch_grouped_gemm,
)
from support.asserts import assert_snr
from support.groups import offsets_of, product_by_expert
from support.triton_interpreter import DEVICE, INTERPRETED

# Experts' row counts, N, K: empty experts first, last and between, partial tiles, edge columns.
CASES = (
    [([0, 5, 0, 70, 33, 0], 72, 128)]
    if INTERPRETED
    else [
        ([0, 5, 0, 700, 333, 128, 0], 1536, 2048),
        ([1], 2048, 768),
        ([0] * 100 + [257] * 28, 200, 384),
        ([70000, 0, 20000], 1536, 2048),
    ]
)


def uneven(*shape):
    """Gaussian numbers whose size differs between rows and between 128-wide columns."""
    *batch, rows, columns = shape
    row_size = torch.exp2(torch.randint(-2, 3, (*batch, rows, 1), device=DEVICE).float())
    column_size = torch.exp2(torch.randint(-2, 3, (*batch, 1, -(-columns // 128)), device=DEVICE).float())
    values = torch.randn(shape, device=DEVICE) * row_size * column_size.repeat_interleave(128, -1)[..., :columns]
    return (values * columns**-0.5).to(torch.bfloat16)


@pytest.fixture(params=range(len(CASES)))
def problem(request, poisoned_empty):
    counts, n, k = CASES[request.param]
    return offsets_of(counts), uneven(sum(counts), k), uneven(len(counts), n, k)


def test_bf16_product(problem):
    offsets, x, weight = problem
    out = grouped_gemm_bf16(x, weight, offsets)
    assert_snr(out, product_by_expert(x, weight, offsets), 45)
    if len(weight) > 1:
        with pytest.raises(AssertionError):
            assert_snr(out, product_by_expert(x, weight.roll(1, 0), offsets), 45)


def test_bf16_input_gradient_from_the_same_weight(problem):
    offsets, x, weight = problem
    grad = uneven(len(x), weight.shape[1])
    out = grouped_gemm_bf16(grad, weight, offsets, transposed=True)
    assert_snr(out, product_by_expert(grad, weight.mT, offsets), 45)
    with pytest.raises(AssertionError):
        assert_snr(out, product_by_expert(grad, weight.flip(2).mT, offsets), 45)


def accumulated(rows, weight, offsets, *, transposed=False):
    """The kernel's sums before they are rounded to BF16."""
    num_experts, n, k = weight.shape
    out = rows.new_empty(len(rows), k if transposed else n, dtype=torch.float32)
    # An FP32 tile takes twice the shared memory, and is stored in slices.
    wide = replace(launch.DEFAULTS["bf16"], epilogue_split=4)
    tile = launch.tile_config("bf16", rows, n, k, num_experts) if INTERPRETED else wide
    return launch_grouped_gemm(rows, weight, offsets, out, tile, transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_fp32_result_is_the_accumulator(problem, transposed):
    offsets, x, weight = problem
    rows = uneven(len(x), weight.shape[1]) if transposed else x
    out = accumulated(rows, weight, offsets, transposed=transposed)
    expected = product_by_expert(rows, weight.mT if transposed else weight, offsets)
    assert_snr(out, expected, 90)
    with pytest.raises(AssertionError):
        assert_snr(out.to(torch.bfloat16), expected, 90)


def test_router_weight_is_rounded_where_told(problem):
    offsets, x, weight = problem
    row_weight = torch.rand(len(x), device=DEVICE) + 0.01
    accumulator = accumulated(x, weight, offsets)
    on_accumulator = (accumulator * row_weight[:, None]).to(torch.bfloat16)
    rounded = accumulator.to(torch.bfloat16) * row_weight.to(torch.bfloat16)[:, None]
    for rounding, expected, other in (
        ("on_accumulator", on_accumulator, rounded),
        ("rounded_product", rounded, on_accumulator),
    ):
        out = grouped_gemm_bf16(x, weight, offsets, row_weight=row_weight, weight_rounding=rounding)
        # The FP32 result comes from another tile shape, which adds in another order.
        assert (out != expected).float().mean() < 0.01
        assert (out != other).float().mean() > 0.1


def test_fp8_channel_product(problem):
    offsets, x, weight = problem
    a8, a_scale = fp8.quantize_token(x)
    w8, w_scale = fp8.quantize_channel(weight)
    out = grouped_gemm_channel(a8, a_scale, w8, w_scale, offsets)
    expected = product_by_expert(a8.double() * a_scale, w8.double() * w_scale, offsets)
    assert_snr(out, expected, 45)
    wrong_axis = w_scale.flatten().roll(1).view_as(w_scale)
    with pytest.raises(AssertionError):
        assert_snr(out, product_by_expert(a8.double() * a_scale, w8.double() * wrong_axis, offsets), 45)


@pytest.mark.parametrize("weighted", [False, True])
def test_fp8_block_product(problem, weighted):
    offsets, x, weight = problem
    row_weight = torch.rand(len(x), device=DEVICE) + 0.01 if weighted else None
    a8, a_scale = fp8.quantize_group(x)
    w8, w_scale = fp8.quantize_block(weight)
    out = grouped_gemm_fp8_block(a8, a_scale, w8, w_scale, offsets, row_weight=row_weight)
    rows = a8.double() * a_scale.repeat_interleave(128, 1)
    rows = rows if row_weight is None else rows * row_weight[:, None]
    wide = fp8.expand_block_scale(w_scale, *weight.shape[1:])
    assert_snr(out, product_by_expert(rows, w8.double() * wide, offsets), 45)
    with pytest.raises(AssertionError):
        assert_snr(out, product_by_expert(rows, w8.double() * wide.roll(1, 0).flip(1), offsets), 45)


def test_rows_behind_the_last_offset_are_left_alone(poisoned_empty):
    counts, n, k = CASES[0]
    x, weight = uneven(sum(counts) + 40, k), uneven(len(counts), n, k)
    out = grouped_gemm_bf16(x, weight, offsets_of(counts))
    assert out.shape == (len(x), n)
    assert_snr(out[: sum(counts)], product_by_expert(x, weight, offsets_of(counts)), 45)
    assert out[sum(counts) :].isnan().all()


def test_no_rows():
    weight = uneven(3, 64, 128)
    assert grouped_gemm_bf16(uneven(0, 128), weight, offsets_of([0, 0, 0])).shape == (0, 64)


def test_all_problems_are_named():
    x, weight = uneven(4, 96)[:, :90].contiguous(), uneven(2, 60, 96).float()
    with pytest.raises(ValueError, match=r"weight is torch\.float32.*90 columns \(legal: 96.*N=60.*offsets has shape"):
        grouped_gemm_bf16(x, weight, offsets_of([4]))
    with pytest.raises(ValueError, match=r"weight is on meta \(legal: .*, as x\)"):
        grouped_gemm_bf16(uneven(4, 96), torch.empty(1, 64, 96, device="meta", dtype=torch.bfloat16), offsets_of([4]))
    weight, row_weight = uneven(1, 64, 96), torch.ones(4, device=DEVICE)
    with pytest.raises(ValueError, match="weight_rounding='sum'"):
        grouped_gemm_bf16(uneven(4, 96), weight, offsets_of([4]), row_weight=row_weight, weight_rounding="sum")


def test_a_problem_takes_the_tile_of_the_nearest_tuned_one():
    device = "NVIDIA H200"
    tuned = launch._tuned_table(device)
    assert {key.split("/")[0] for key in tuned} <= set(launch.DEFAULTS)
    key = launch.problem_key("fp8_channel", 1536, 2048, 128, 180224)
    assert launch._nearest_tile(device, key) == tuned[key]
    between = launch.problem_key("fp8_channel", 1536, 2048, 128, 150000)
    assert launch._nearest_tile(device, between) == tuned[key]
    assert launch._nearest_tile("a device without a table", key) is None


@pytest.mark.gpu
def test_compiled_and_captured():
    counts, n, k = CASES[0]
    x, weight, offsets = uneven(sum(counts), k), uneven(len(counts), n, k), offsets_of(counts)
    expected = grouped_gemm_bf16(x, weight, offsets)
    compiled = torch.compile(grouped_gemm_bf16, fullgraph=True)(x, weight, offsets)
    assert torch.equal(compiled, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grouped_gemm_bf16(x, weight, offsets)
    captured.fill_(torch.nan)
    other_counts = counts[::-1]
    offsets.copy_(offsets_of(other_counts))
    graph.replay()
    assert_snr(captured, product_by_expert(x, weight, offsets), 45)
