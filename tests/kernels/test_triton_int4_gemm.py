import pytest
import torch

from qarl_kernels import get_format, integer, nvfp4
from qarl_kernels.ops.grouped_gemm import grouped_gemm_bf16
from qarl_kernels.ops.int4_gemm import grouped_gemm_int4
from qarl_kernels.ops.operand_gemm import quantize_and_multiply
from qarl_kernels.ops.weights import operand_from_weight
from qarl_kernels.weights import largest_reference, quantize_weight_reference
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import moved, uneven_weight
from support.groups import offsets_of, product_by_expert
from support.triton_interpreter import DEVICE, INTERPRETED

CASES = (
    [([0, 5, 70, 0], 72, 128)]
    if INTERPRETED
    else [
        ([0, 5, 0, 700, 333, 128, 0], 1536, 2048),
        ([1], 2048, 768),
        ([130] * 16, 768, 2048),
    ]
)
ROUNDINGS = ("on_accumulator", "rounded_product")


@pytest.fixture(params=[(case, group) for case in range(len(CASES)) for group in (32, 64, 128)])
def problem(request, poisoned_empty):
    (counts, n, k), group_size = CASES[request.param[0]], request.param[1]
    codes, scale = integer.quantize_integer(uneven_weight(len(counts), n, k), 4, group_size, "full_range")
    x = torch.randn(sum(counts), k).to(torch.bfloat16)
    return x.to(DEVICE), codes.to(DEVICE), scale.to(DEVICE), offsets_of(counts)


def assert_read_out(words, scale, weight):
    """Rows of the identity read the last expert's weight out, bit for bit but for the sign of zeros."""
    eye = torch.eye(weight.shape[-1], dtype=torch.bfloat16, device=DEVICE)
    out = grouped_gemm_int4(eye, words, scale, offsets_of([0] * (len(weight) - 1) + [len(eye)]))
    assert_bitwise_equal(out + 0, weight[-1].T.contiguous() + 0)


def assert_weighted(x, words, scale, offsets, weight):
    """Rows are multiplied by their router weights where they are with BF16 weights."""
    row_weight = torch.rand(len(x), device=DEVICE) + 0.01
    found, expected = (
        [multiply(x, *operands, offsets, row_weight=row_weight, weight_rounding=rounding) for rounding in ROUNDINGS]
        for multiply, operands in ((grouped_gemm_int4, (words, scale)), (grouped_gemm_bf16, (weight,)))
    )
    for out, right, other in zip(found, expected, expected[::-1], strict=True):
        assert (out != right).float().mean() < 0.05
        assert (out != other).float().mean() > 0.1
        assert_snr(out, right, 45)


def test_product(problem):
    x, codes, scale, offsets = problem
    packed = integer.pack_int32(codes, 4)
    out = grouped_gemm_int4(x, packed, scale, offsets)
    assert_snr(out, product_by_expert(x, integer.dequantize_integer(codes, scale), offsets), 45)
    shifted = integer.dequantize_integer(codes + 1, scale)
    with pytest.raises(AssertionError):
        assert_snr(out, product_by_expert(x, shifted, offsets), 45)
    wrong_axis = integer.dequantize_integer(codes, scale.flatten().roll(1).view_as(scale))
    with pytest.raises(AssertionError):
        assert_snr(out, product_by_expert(x, wrong_axis, offsets), 45)


def test_every_weight_is_rounded_as_the_reference(problem):
    _, codes, scale, _ = problem
    assert_read_out(integer.pack_int32(codes, 4), scale, integer.dequantize_integer(codes, scale))


def test_router_weight(problem):
    x, codes, scale, offsets = problem
    assert_weighted(x, integer.pack_int32(codes, 4), scale, offsets, integer.dequantize_integer(codes, scale))


@pytest.fixture(params=[([0, 5, 3], 40, 96)] if INTERPRETED else CASES, ids=str)
def nvfp4_problem(request, poisoned_empty):
    counts, n, k = request.param
    weight = uneven_weight(len(counts), n, k)
    codes, scale = nvfp4.quantize(weight, nvfp4.global_divisor(largest_reference(weight)))
    x = torch.randn(sum(counts), k).to(torch.bfloat16)
    return x.to(DEVICE), nvfp4.pack(codes).to(DEVICE), scale.to(DEVICE), offsets_of(counts)


def test_nvfp4_product_and_its_weighted_rows(nvfp4_problem):
    x, packed, scale, offsets = nvfp4_problem
    weight, words = nvfp4.unscaled(packed, scale), packed.view(torch.int32)
    plain = grouped_gemm_int4(x, words, scale, offsets)
    assert_snr(plain, product_by_expert(x, weight, offsets), 45)
    assert_weighted(x, words, scale, offsets, weight)
    moved = scale.view(torch.uint8).flatten().roll(1).view(scale.shape).view(scale.dtype)
    for wrong in (nvfp4.unscaled(packed ^ 1, scale), nvfp4.unscaled(packed, moved)):
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(plain, product_by_expert(x, wrong, offsets), 20)


def test_every_nvfp4_weight_is_read_exactly(nvfp4_problem):
    _, packed, scale, _ = nvfp4_problem
    assert_read_out(packed.view(torch.int32), scale, nvfp4.unscaled(packed, scale))


def test_an_odd_number_of_nvfp4_groups_is_unpacked_first():
    weight = (torch.randn(2, 24, 48) * 48**-0.5).bfloat16()
    stored = quantize_weight_reference(weight, get_format("nvfp4"), name="w")
    x, offsets = torch.randn(9, 48).bfloat16().to(DEVICE), offsets_of([6, 3])
    operand = operand_from_weight(moved(stored, DEVICE), packed=True)
    assert operand.is_packed
    out = quantize_and_multiply(x, operand, offsets, out_dtype=torch.bfloat16, after_swiglu=False)
    assert_snr(out, product_by_expert(x.cpu(), stored.dequantize(), offsets.cpu()), 40)


def test_all_problems_are_named():
    x = torch.zeros(4, 128, dtype=torch.bfloat16, device=DEVICE)
    packed = torch.zeros(2, 60, 8, dtype=torch.int32, device=DEVICE)
    scale = torch.zeros(2, 60, 3, dtype=torch.bfloat16, device=DEVICE)
    offsets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"128 columns, packed holds 64.*N=60.*scale has shape \[2, 60, 3\] \(legal"):
        grouped_gemm_int4(x, packed, scale, offsets)
