"""avg@k and pass@k against numbers derived by hand, and averages of benchmarks."""

import itertools

import pytest

from qarl_nemo.measure.eval.scores import average, avg_at_k, pass_at_k, reported_ks
from qarl_nemo.metrics.estimate import Estimate


def test_avg_at_k_is_the_mean_share_and_its_error_is_over_problems():
    # Shares 1/4, 3/4, 2/4: mean 1/2, variance (1/16 + 1/16 + 0) / 2 = 1/16, error sqrt(1/16 / 3)
    found = avg_at_k([1, 3, 2], 4)
    assert found.value == pytest.approx(0.5)
    assert found.standard_error == pytest.approx((1 / 48) ** 0.5)
    # Twelve independent answers, half of them right, would have sqrt(6 * 6 / 12 / 11 / 12).
    assert found.standard_error != pytest.approx((3 / 132) ** 0.5)


def test_a_single_problem_has_no_error():
    assert avg_at_k([1], 4) == Estimate(0.25, None)


@pytest.mark.parametrize(("right", "k"), [(0, 2), (1, 1), (1, 2), (2, 3), (4, 2), (3, 4)])
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_answer(right, k):
    answers = [number < right for number in range(4)]
    chosen = list(itertools.combinations(answers, k))
    expected = sum(map(any, chosen)) / len(chosen)
    assert pass_at_k([right], 4, k).value == pytest.approx(expected)
    if 0 < right < 4 and k > 1:
        # The plug-in estimate 1 - (1 - c/n)^k, which is biased, is another number.
        assert pass_at_k([right], 4, k).value != pytest.approx(1 - (1 - right / 4) ** k)


def test_pass_at_one_is_avg_at_k():
    assert pass_at_k([1, 3, 0], 4, 1) == avg_at_k([1, 3, 0], 4)


def test_powers_of_two_are_reported_and_the_whole():
    assert reported_ks(1) == [1]
    assert reported_ks(32) == [1, 2, 4, 8, 16, 32]
    assert reported_ks(6) == [1, 2, 4, 6]


def test_benchmarks_weigh_the_same_in_an_average():
    # Errors 0.03 and 0.04 give sqrt(0.0009 + 0.0016) / 2 = 0.025
    assert average([Estimate(0.2, 0.03), Estimate(0.6, 0.04)]).value == pytest.approx(0.4)
    assert average([Estimate(0.2, 0.03), Estimate(0.6, 0.04)]).standard_error == pytest.approx(0.025)
    assert average([Estimate(0.2, 0.03), Estimate(0.6, None)]).standard_error is None
