"""RMSNorm's sums in the order of the engine's threads and warps, and the norm against float64."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from qarl_kernels.ops.norm import norm_layout, rms_norm_in_engine_order, sum_of_squares
from support.asserts import assert_bitwise_equal, assert_snr
from support.triton_interpreter import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Heads, half a warp; one warp and two; eight warps; not a power of two.
COLUMNS = [128, 256, 512, 2048, 1280]


@triton.jit
def _sums_kernel(
    x_ptr,
    out_ptr,
    m,
    h: tl.constexpr,
    pairs: tl.constexpr,
    rows: tl.constexpr,
    threads: tl.constexpr,
    levels: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    tl.store(out_ptr + row, sum_of_squares(x_ptr, row, m, h, rows, threads, levels, pairs), mask=row < m)


def kernel_sums(x, *, pairs):
    layout, out = norm_layout(x.shape[1]), torch.empty(len(x), device=DEVICE)
    sizes = {name.lower(): value for name, value in layout.items()}
    _sums_kernel[(triton.cdiv(len(x), layout["ROWS"]),)](x, out, len(x), h=x.shape[1], pairs=pairs, **sizes)
    return out


def engine_sums(x, *, pairs):
    """Thread by thread, with CUB's shuffles: lane l adds what lane l + 1 held, then l + 2, l + 4, ..."""
    squares = np.square(x.float().cpu().numpy()).reshape(len(x), -1, 8)
    threads = np.zeros(squares.shape[:2], np.float32)
    for place in range(0, 8, 2):
        if pairs:
            threads = threads + (squares[..., place] + squares[..., place + 1])
        else:
            threads = (threads + squares[..., place]) + squares[..., place + 1]
    warps = []
    for start in range(0, threads.shape[1], 32):
        lanes = threads[:, start : start + 32]
        for step in (1, 2, 4, 8, 16):
            beyond = np.zeros_like(lanes)
            beyond[:, : max(lanes.shape[1] - step, 0)] = lanes[:, step:]
            lanes = lanes + beyond
        warps.append(lanes[:, 0])
    total = warps[0]
    for warp in warps[1:]:
        total = total + warp
    return torch.from_numpy(total).to(DEVICE)


def rows_of_x(columns):
    scale = torch.exp2(torch.randint(-4, 4, (33, columns)).float())
    return (torch.randn(33, columns) * scale).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_squares_are_added_in_the_engines_order(columns, pairs):
    x = rows_of_x(columns)
    assert_bitwise_equal(kernel_sums(x, pairs=pairs), engine_sums(x, pairs=pairs))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(kernel_sums(x, pairs=pairs), engine_sums(x, pairs=not pairs))


@pytest.mark.parametrize("after_add", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_are_normalized(columns, after_add):
    x, weight = rows_of_x(columns), torch.rand(columns).to(DEVICE, torch.bfloat16)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = rms_norm_in_engine_order(x, weight, 1e-6, after_add=after_add)
    assert_snr(out, expected, 50)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(out, expected.roll(1, 1), 50)


def test_what_it_cannot_normalize_is_listed():
    x = torch.ones(2, 12, device=DEVICE)
    with pytest.raises(ValueError, match=r"x is torch\.float32") as error:
        rms_norm_in_engine_order(x, torch.ones(8, device=DEVICE), 1e-6, after_add=False)
    assert "weight has shape [8] (legal: [12])" in str(error.value)
    assert "x has 12 columns (legal: multiples of 8 up to 8192)" in str(error.value)


def test_no_rows():
    empty = torch.empty(0, 128, dtype=torch.bfloat16, device=DEVICE)
    assert rms_norm_in_engine_order(empty, empty.new_ones(128), 1e-6, after_add=True).shape == (0, 128)
