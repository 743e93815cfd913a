import math
from typing import get_args

import pytest

from qarl_nemo.losses.config import LossConfig
from qarl_nemo.metrics.report.bands import objective_bands

ANY = (0.0, math.inf)


def test_tbpo_has_an_upper_line_for_both_signs_and_a_two_sided_cap():
    bands = objective_bands(
        {
            "objective": "tbpo",
            "positive_clip_high": 0.01,
            "negative_clip_low": 0.02,
            "negative_clip_high": 0.03,
            "mismatch_cap": 4,
        }
    )
    assert bands.unit == "response"
    assert bands.prox == {"positive": (0.0, 1.01), "negative": (0.98, 1.03)}
    assert bands.mismatch == (0.25, 4)


@pytest.mark.parametrize(
    ("loss_fn", "unit", "positive", "negative", "mismatch"),
    [
        ({"objective": "grpo_tis", "clip_low": 0.1, "clip_high": 0.3}, "token", (0, 1.3), (0.9, math.inf), (0, 2)),
        ({"objective": "grpo_tis", "clip_high": 0.3, "mismatch_cap": None}, "token", (0, 1.3), (0.8, math.inf), ANY),
        ({"objective": "qurl_acr", "clip_low": 0.1, "clip_high": 0.3}, "token", (0, 1.3), (0.9, math.inf), (0, 2)),
        ({"objective": "gspo", "clip_low": 0.1, "clip_high": 0.3}, "response", (0, 1.3), (0.9, math.inf), ANY),
        (
            {"objective": "mis_gspo", "clip_low": 0.1, "clip_high": 0.3, "mismatch_low": 0.5, "mismatch_high": 3},
            "response",
            (0, 1.3),
            (0.9, math.inf),
            (0.5, 3),
        ),
        ({"objective": "positive_grpo", "clip_high": 0.3, "mismatch_cap": 5}, "token", (0, 1.3), ANY, (0, 5)),
        ({"objective": "on_policy_grpo"}, "token", ANY, ANY, (0, 2)),
        (
            {"objective": "dual_clip_grpo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4},
            "token",
            (0, 1.3),
            (0.9, 4),
            (0, 2),
        ),
        ({"objective": "sapo"}, "token", ANY, ANY, ANY),
    ],
    ids=lambda value: value["objective"] if isinstance(value, dict) else "",
)
def test_lines_of_each_objective(loss_fn, unit, positive, negative, mismatch):
    bands = objective_bands(loss_fn)
    assert bands.unit == unit
    assert bands.prox["positive"] == pytest.approx(positive)
    assert bands.prox["negative"] == pytest.approx(negative)
    assert bands.mismatch == pytest.approx(mismatch)


def test_every_objective_that_can_be_configured_has_lines():
    models = get_args(get_args(LossConfig)[0])
    names = [model.model_fields["objective"].default for model in models]
    assert len(names) >= 9
    assert all(objective_bands({"objective": name}) is not None for name in names)


@pytest.mark.parametrize("loss_fn", [None, {}, {"objective": "other"}, {"objective": "tbpo", "unknown": 1}], ids=str)
def test_an_unknown_block_has_none(loss_fn):
    assert objective_bands(loss_fn) is None
