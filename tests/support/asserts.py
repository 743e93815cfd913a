"""Assertions the tests share; each names the first place that differs."""

import torch
from torch import Tensor

# How much FP32 sums in another order may change a logprob, on any CPU: values up to 16 nats are rounded by 2^-24, some
# hundred times in a row from the embedding to the logprob. Observed changes are a fiftieth of it, since roundings
# cancel; the smallest mistake that a test makes on purpose is ten times as large.
FP32_NATS = 16 * 100 * 2.0**-24  # 1e-4


def assert_bitwise_equal(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bytes: tells 0 from -0 and one NaN from another; names the first element that differs."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    left, right = _bytes(actual), _bytes(expected)
    differs = (left != right).any(-1)
    if bool(differs.any()):
        element = int(differs.nonzero()[0])
        index = [int(axis) for axis in torch.unravel_index(torch.tensor(element), actual.shape)]
        raise AssertionError(
            f"{int(differs.sum())} of {actual.numel()} elements differ, the first at {index}: "
            f"{actual[tuple(index)].item()} (bytes {left[element].tolist()}), expected "
            f"{expected[tuple(index)].item()} (bytes {right[element].tolist()})"
        )


def assert_snr(actual: Tensor, expected: Tensor, min_db: float) -> None:
    """10 log10(sum expected^2 / sum (actual - expected)^2) >= min_db in float64; NaN and all-zero references fail."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    reference = expected.detach().cpu().double()
    noise = (actual.detach().cpu().double() - reference).square().sum()
    signal = reference.square().sum()
    assert bool(signal > 0), "the expected tensor is empty or all zero: compare it bitwise"
    snr_db = float(10 * torch.log10(signal / noise))
    assert snr_db >= min_db, f"SNR {snr_db:.1f} dB, expected at least {min_db} dB"


def _bytes(tensor: Tensor) -> Tensor:
    # A one-element tensor is contiguous at any stride; viewing it as bytes needs stride 1.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).view(-1, flat.element_size())
