import math

import pytest
import torch

from qarl_nemo.metrics.mismatch import mismatch_metrics

PREV = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -9.0, 0.0]])
GENERATION = torch.tensor([[-1.5, -2.0, -2.0], [-0.5, -1.0, -1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
# d = prev - generation over valid tokens: 0.5, 0, -1 | 0
# |gap|: mean 1.5 / 4, max 1; k1 = 0.5 / 4; k3 = (e^0.5 - 1.5 + 0 + e^-1 + 0) / 4
# sequence weights: exp(-0.5 / 3) and 1; p01 and p99 interpolate a hundredth from either end
LIGHT = math.exp(-0.5 / 3)
EXPECTED = {
    "mismatch/abs_gap_mean": 0.375,
    "mismatch/abs_gap_max": 1.0,
    "mismatch/kl_k1": 0.125,
    "mismatch/kl_k3": (math.exp(0.5) - 1.5 + math.exp(-1)) / 4,
    "mismatch/nonfinite_tokens": 0,
    "mismatch/weight_p01": LIGHT + 0.01 * (1 - LIGHT),
    "mismatch/weight_p50": (LIGHT + 1) / 2,
    "mismatch/weight_p99": LIGHT + 0.99 * (1 - LIGHT),
}


def test_figures_are_those_derived_by_hand():
    assert mismatch_metrics(PREV, GENERATION, MASK) == pytest.approx(EXPECTED, rel=1e-6)


def test_swapped_policies_fail_the_same_tolerance():
    swapped = mismatch_metrics(GENERATION, PREV, MASK)
    for key in ("mismatch/kl_k1", "mismatch/kl_k3", "mismatch/weight_p50"):
        assert swapped[key] != pytest.approx(EXPECTED[key], rel=1e-6)


def test_masked_tokens_may_hold_anything():
    prev = PREV.clone()
    prev[1, 1:] = torch.tensor([float("-inf"), float("nan")])
    assert mismatch_metrics(prev, GENERATION, MASK) == pytest.approx(EXPECTED, rel=1e-6)


def test_nonfinite_tokens_are_counted_and_left_out_of_numerator_and_denominator():
    generation = GENERATION.clone()
    generation[0, 2] = float("-inf")
    metrics = mismatch_metrics(PREV, generation, MASK)
    assert metrics["mismatch/nonfinite_tokens"] == 1
    # d is left with 0.5, 0 | 0
    assert metrics["mismatch/abs_gap_mean"] == pytest.approx(0.5 / 3, rel=1e-6)
    assert metrics["mismatch/weight_p99"] == pytest.approx(1 + 0.99 * (math.exp(0.25) - 1), rel=1e-6)


def test_the_weight_of_a_response_far_from_its_engine_can_be_recorded():
    one = torch.ones(1, 1)
    assert mismatch_metrics(0 * one, -800 * one, one)["mismatch/weight_p50"] == pytest.approx(math.exp(20))


def test_without_tokens_there_is_nothing_to_measure():
    metrics = mismatch_metrics(PREV, GENERATION, torch.zeros_like(MASK))
    assert metrics.pop("mismatch/nonfinite_tokens") == 0
    assert all(math.isnan(value) for value in metrics.values())


def test_bf16_logprobs_are_compared_in_double():
    # bf16 holds -100 and -100.5 exactly; their difference must not be rounded again
    metrics = mismatch_metrics(
        torch.tensor([[-100.0]]).bfloat16(), torch.tensor([[-100.5]]).bfloat16(), torch.ones(1, 1)
    )
    assert metrics["mismatch/abs_gap_mean"] == 0.5
