import math

import pytest
import torch

from qarl_nemo.metrics.fidelity import Scores
from qarl_nemo.metrics.report import fidelity as picture
from qarl_nemo.metrics.report.style import new_figure

LEARNER = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -9.0, 0.0]])
ENGINE = torch.tensor([[-1.5, -2.0, -2.0], [-0.5, -1.0, -1.0]])
SAME_TOP = torch.tensor([[True, False, True], [True, True, True]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
# d = learner - engine: 0.5, 0, -1 | 0. |gap| sorted 0, 0, 0.5, 1: p50 = 0.25 halfway between 0 and 0.5; p90 at rank 2.7
# = 0.5 + 0.7 * 0.5; p99 at rank 2.97. Ratios exp(-0.5 / 3) and 1.
LIGHT = math.exp(-0.5 / 3)
EXPECTED = {
    "gap_mean": 0.375,
    "gap_p50": 0.25,
    "gap_p90": 0.85,
    "gap_p99": 0.985,
    "gap_max": 1.0,
    "kl_k3": (math.exp(0.5) - 1.5 + math.exp(-1)) / 4,
    "ratio_p01": LIGHT + 0.01 * (1 - LIGHT),
    "ratio_p50": (LIGHT + 1) / 2,
    "ratio_p99": LIGHT + 0.99 * (1 - LIGHT),
    "top1_agreement": 0.75,
    "num_tokens": 4,
    "nonfinite_tokens": 0,
}


def test_figures_are_those_derived_by_hand():
    assert Scores(LEARNER, ENGINE, SAME_TOP, MASK).metrics() == pytest.approx(EXPECTED, rel=1e-6)


def test_learner_and_engine_are_not_interchangeable():
    swapped = Scores(ENGINE, LEARNER, SAME_TOP, MASK).metrics()
    assert swapped["gap_mean"] == EXPECTED["gap_mean"]
    for key in ("kl_k3", "ratio_p50"):
        assert swapped[key] != pytest.approx(EXPECTED[key], rel=1e-3)


def test_logprobs_shifted_by_one_token_show():
    shifted = Scores(LEARNER.roll(1, 1), ENGINE, SAME_TOP, MASK).metrics()
    # d becomes -1.5, 1, 0 | 0.5
    assert shifted["gap_mean"] == 0.75 != EXPECTED["gap_mean"]


def test_a_broken_token_is_counted_and_left_out():
    learner = LEARNER.clone()
    learner[0, 2] = float("nan")
    figures = Scores(learner, ENGINE, SAME_TOP, MASK).metrics()
    assert (figures["num_tokens"], figures["nonfinite_tokens"]) == (4, 1)
    # d is left with 0.5, 0 | 0, of which two agree on the likeliest token
    assert figures["gap_mean"] == pytest.approx(0.5 / 3)
    assert figures["top1_agreement"] == pytest.approx(2 / 3)


def test_positions_are_measured_in_intervals_that_hold_tokens():
    first, last = Scores(LEARNER, ENGINE, SAME_TOP, MASK).by_position(max_intervals=2)
    assert (first["first"], first["last"], last["first"], last["last"]) == (0, 1, 2, 2)
    # 0.5, 0 | 0 and then -1
    assert (first["num_tokens"], first["gap_mean"]) == (3, pytest.approx(0.5 / 3))
    assert (last["num_tokens"], last["gap_mean"], last["ratio_p50"]) == (1, 1.0, pytest.approx(math.exp(-1)))


def test_intervals_without_tokens_are_left_out():
    mask = MASK & torch.tensor([True, False, False])
    assert [row["first"] for row in Scores(LEARNER, ENGINE, SAME_TOP, mask).by_position()] == [0]


def test_the_distribution_runs_from_the_smallest_gap_to_the_largest():
    values = Scores(LEARNER, ENGINE, SAME_TOP, MASK).gap_cdf()
    # rank 3 * level of 0, 0, 0.5, 1
    assert len(values) == 101
    assert [values[i] for i in (0, 50, 90, 100)] == pytest.approx([0, 0.25, 0.85, 1])


def test_the_picture_counts_tokens_from_one_and_its_shares_grow_with_the_gap(tmp_path, monkeypatch):
    scores, drawn = Scores(LEARNER, ENGINE, SAME_TOP, MASK), []
    monkeypatch.setattr(picture, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    row = {"arm": "aligned", "format": "w4a16", "decoding": "sampled"}
    row |= {"by_position": scores.by_position(max_intervals=2), "gap_cdf": scores.gap_cdf()}
    picture.write_fidelity_figure([row], tmp_path / "gap.png", "a title")
    (by_position,), (distribution,) = (axes.lines for axes in drawn[0].axes)
    # The first two tokens, and the third.
    assert by_position.get_xdata().tolist() == [1.5, 3.0]
    assert by_position.get_ydata().tolist() == pytest.approx([0.5 / 3, 1.0])
    assert [distribution.get_ydata()[place] for place in (0, -1)] == [0.0, 1.0]
    assert distribution.get_xdata()[-1] == 1.0


def test_a_long_comparison_has_a_distribution():
    # torch.quantile takes one value less.
    many = torch.zeros(1, 2**24 + 1)
    mask = torch.ones(many.shape, dtype=torch.bool)
    assert Scores(many, many, mask, mask).gap_cdf() == [0.0] * 101


def test_without_tokens_there_is_nothing_to_measure():
    nothing = torch.zeros_like(MASK)
    assert math.isnan(Scores(LEARNER, ENGINE, SAME_TOP, nothing).metrics()["gap_mean"])
    assert Scores(LEARNER, ENGINE, SAME_TOP, nothing).gap_cdf() == []
    assert Scores(LEARNER, ENGINE, SAME_TOP, nothing).by_position() == []
