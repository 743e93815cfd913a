"""avg@k and pass@k against numbers derived by hand, a model's result, and averages of benchmarks."""

import itertools
from dataclasses import replace

import pytest

from qarl_nemo.data.benchmark_fields import Problem
from qarl_nemo.data.benchmarks import BENCHMARKS
from qarl_nemo.measure.eval.evaluation import Asked
from qarl_nemo.measure.eval.run import score
from qarl_nemo.measure.eval.scores import average, avg_at_k, pass_at_k, reported_ks
from qarl_nemo.measure.eval.settings import Questions
from qarl_nemo.metrics.estimate import Estimate
from qarl_nemo.train.sampling import SamplingParams


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


def test_a_problem_that_is_too_long_to_be_asked_counts_as_answered_wrongly():
    benchmark = replace(BENCHMARKS["math500"], num_samples=2)
    questions = Questions(benchmark, {index: Problem("q", "a") for index in (3, 5, 8)}, num_total=10)
    asked = Asked(questions, {3: [1], 5: [1]}, {}, {}, SamplingParams(max_new_tokens=16, temperature=0.6, top_p=0.9))
    answers = [
        {"problem": problem, "right": right, "num_tokens": length, "truncated": length == 16}
        for problem, right, length in ((3, True, 4), (3, True, 6), (5, True, 10), (5, False, 16))
    ]
    row = score(asked, answers)
    # 2, 1 and 0 of two answers are right.
    assert row["avg"]["value"] == pytest.approx(0.5)
    assert {k: one["value"] for k, one in row["pass_at"].items()} == pytest.approx({"1": 0.5, "2": 2 / 3})
    assert (row["num_problems"], row["num_total"], row["num_overlong"]) == (3, 10, 1)
    assert (row["mean_tokens"], row["truncated"]) == (9.0, 0.25)
    assert (row["max_new_tokens"], row["temperature"], row["top_p"]) == (16, 0.6, 0.9)
    assert row["shortened_from"] == benchmark.max_new_tokens


def test_benchmarks_weigh_the_same_in_an_average():
    # Errors 0.03 and 0.04 give sqrt(0.0009 + 0.0016) / 2 = 0.025
    assert average([Estimate(0.2, 0.03), Estimate(0.6, 0.04)]).value == pytest.approx(0.4)
    assert average([Estimate(0.2, 0.03), Estimate(0.6, 0.04)]).standard_error == pytest.approx(0.025)
    assert average([Estimate(0.2, 0.03), Estimate(0.6, None)]).standard_error is None
