import pytest
import torch

from qarl_kernels.ops.wgrad import grouped_wgrad
from support.asserts import assert_bitwise_equal, assert_snr
from support.groups import offsets_of
from support.triton_interpreter import DEVICE, INTERPRETED
from support.weights import LAYOUTS

CASES = (
    [([0, 5, 0, 70, 33, 0], 72, 64)]
    if INTERPRETED
    else [
        ([0, 5, 0, 700, 333, 128, 0], 1536, 2048),
        ([4000], 2048, 768),
        ([0] * 100 + [257] * 28, 200, 384),
    ]
)


@pytest.fixture(params=range(len(CASES)))
def problem(request, poisoned_empty):
    counts, n, k = CASES[request.param]
    grad = torch.randn(sum(counts), n, device=DEVICE).to(torch.bfloat16)
    x = torch.randn(sum(counts), k, device=DEVICE).to(torch.bfloat16)
    return counts, grad, x, offsets_of(counts)


def reference(grad, x, counts):
    pairs = zip(grad.double().split(counts), x.double().split(counts), strict=True)
    return torch.stack([g.T @ rows for g, rows in pairs])


def test_gradient(problem):
    counts, grad, x, offsets = problem
    out = grouped_wgrad(grad, x, offsets)
    expected = reference(grad, x, counts)
    assert out.dtype == torch.bfloat16
    assert_snr(out, expected, 45)
    for expert, count in enumerate(counts):
        if count == 0:
            assert_bitwise_equal(out[expert], torch.zeros_like(out[expert]))
    one_row_off = [counts[0] + 1, *counts[1:-1], counts[-1] - 1] if counts[-1] else None
    if one_row_off and len(counts) > 1:
        with pytest.raises(AssertionError):
            assert_snr(out, reference(grad, x, one_row_off), 45)


def test_a_neighbours_nan_stays_with_the_neighbour(problem):
    counts, grad, x, offsets = problem
    if len(counts) == 1:
        pytest.skip("one expert has no neighbour")
    start, stop = offsets[3].item(), offsets[4].item()
    grad[stop:], x[stop:] = torch.nan, torch.nan
    grad[:start], x[:start] = torch.nan, torch.nan
    out = grouped_wgrad(grad, x, offsets)
    expected = grad[start:stop].double().T @ x[start:stop].double()
    if stop > start:
        assert_snr(out[3], expected, 45)
    else:
        assert_bitwise_equal(out[3], torch.zeros_like(out[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", ["stacked", "reverse", "scattered"])
def test_written_into_the_given_memory(problem, dtype, accumulate, layout):
    counts, grad, x, offsets = problem
    expected = reference(grad, x, counts)
    before = torch.randn_like(expected) if accumulate else torch.full_like(expected, torch.nan)
    before = before.to(dtype)
    out = before.clone() if layout == "stacked" else LAYOUTS[layout](before)
    assert grouped_wgrad(grad, x, offsets, out=out, accumulate=accumulate) is out
    result = out if isinstance(out, torch.Tensor) else torch.stack(out)
    assert_snr(result, expected + (before.double() if accumulate else 0), 45)
    for expert, count in enumerate(counts):
        if count == 0:
            assert_bitwise_equal(result[expert], before[expert] if accumulate else torch.zeros_like(before[expert]))
    if accumulate:
        with pytest.raises(AssertionError):
            assert_snr(result, expected, 45)


def test_all_problems_are_named():
    grad = torch.zeros(4, 60, dtype=torch.bfloat16, device=DEVICE)
    x = torch.zeros(5, 64, dtype=torch.bfloat16, device=DEVICE)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"4 rows \(legal: 5.*grad_out has 60 columns.*accumulate without out"):
        grouped_wgrad(grad, x, offsets, accumulate=True)
    # Every expert must begin at a multiple of 16 bytes, not the first alone.
    wide = torch.zeros(2, 64 * 64 + 4, dtype=torch.bfloat16, device=DEVICE)[:, : 64 * 64].view(2, 64, 64)
    rows = torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="16-byte aligned"):
        grouped_wgrad(rows, rows, torch.tensor([0, 2, 4], dtype=torch.int32, device=DEVICE), out=wide)
    grad, out = torch.zeros_like(x), torch.zeros(64, 64, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match=r"out has 2 tensors \(legal: 1.*float16 \(legal"):
        grouped_wgrad(grad, x, offsets, out=[out, out])
