from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgba

from qarl_nemo.metrics.report.arms import Arm, group_by_arm
from qarl_nemo.metrics.report.distributions import Ratios, histogram_figure, mismatch_weights, prox_ratios
from qarl_nemo.metrics.report.positions import error_position_figure
from qarl_nemo.metrics.report.scatter import scatter_figure
from qarl_nemo.metrics.report.style import SIGN_COLORS, ZERO_COLOR
from qarl_nemo.metrics.report.timings import phase_seconds, phase_table
from qarl_nemo.metrics.runs import load_runs

EVERYTHING = (0.0, np.inf)


def ratios(positive, negative, lines):
    by_sign = {"positive": np.array(positive), "negative": np.array(negative)}
    return Ratios(Arm("arm", "#000000", ()), "response", by_sign, lines)


def vertical_lines(axes):
    return [line.get_xdata()[0] for line in axes.lines]


def test_bands_are_drawn_over_the_sign_they_belong_to():
    lines = {"positive": (0.0, 1.01), "negative": (0.98, 1.02)}
    figure = histogram_figure(
        [ratios([0.99, 1.0, 1.02], [0.97, 1.01], lines)], 6, quantity="prox ratio", line_name="band"
    )
    above, below = figure.axes
    assert vertical_lines(above) == [1.01]
    assert vertical_lines(below) == [0.98, 1.02]
    # two of three lie in (0, 1.01], one of two in [0.98, 1.02]
    assert above.texts[0].get_text() == "n = 3, 66.7 % in the band"
    assert below.texts[0].get_text() == "n = 2, 50 % in the band"


def test_error_tokens_are_shares_of_the_tokens_at_their_place():
    # 48 positions, two an interval: four responses reach the first 24, one the rest, and two tokens of each are errors.
    tokens, wrong = np.repeat([4.0, 1.0], 24), np.zeros(48)
    wrong[[0, 1, 24, 25]] = 2.0, 2.0, 1.0, 1.0
    arm = SimpleNamespace(name="arm", color="#000000", each_diagnostic=lambda *_: [np.stack([tokens, wrong])])
    (line,) = error_position_figure([arm], 6).axes[0].lines
    assert line.get_xdata()[:2].tolist() == [1.5, 3.5]
    assert line.get_ydata().tolist() == [0.5, *[0.0] * 11, 1.0, *[0.0] * 11]


def test_a_line_far_from_the_data_is_named_instead_of_squeezing_it():
    lines = dict.fromkeys(SIGN_COLORS, (0.5, 2.0))
    figure = histogram_figure([ratios([0.9999, 1.0001], [1.0], lines)], 6, quantity="mismatch weight", line_name="cap")
    assert vertical_lines(figure.axes[0]) == []
    assert "cap at 0.5 and 2, off this axis" in figure.axes[0].texts[0].get_text()
    low, high = figure.axes[0].get_xlim()
    assert 0.999 < low < 0.9999
    assert 1.0001 < high < 1.001


def test_a_histogram_of_no_responses_has_no_negative_shares():
    lines = dict.fromkeys(SIGN_COLORS, (0.5, 2.0))
    figure = histogram_figure([ratios([], [1.0], lines)], 6, quantity="prox ratio", line_name="band")
    assert [axes.get_ylim()[0] for axes in figure.axes] == [0.0, 0.0]


def test_histogram_heights_are_shares_and_nothing_is_lost_beyond_the_axis():
    values = np.concatenate([np.linspace(0.99, 1.01, 997), [0.1, 5.0, 9.0]])
    figure = histogram_figure(
        [ratios(values, [], dict.fromkeys(SIGN_COLORS, EVERYTHING))], 6, quantity="r", line_name="band"
    )
    heights = figure.axes[0].patches[0].get_data().values
    assert heights.sum() == pytest.approx(1.0)
    assert figure.axes[0].get_xlim()[1] < 1.1


@pytest.mark.parametrize(("spread", "scale"), [(1e-4, "linear"), (0.1, "linear"), (3.0, "log")])
def test_wide_ratios_get_a_log_axis(spread, scale):
    values = np.exp(np.linspace(-spread, spread, 101))
    figure = histogram_figure(
        [ratios(values, values, dict.fromkeys(SIGN_COLORS, EVERYTHING))], 6, quantity="r", line_name="band"
    )
    assert figure.axes[1].get_xscale() == scale
    assert ("times" in figure.axes[1].get_xlabel()) == (scale == "linear")


def arms_of(make_run, *alignments):
    return group_by_arm(load_runs([make_run(name, alignment=name, num_steps=1) for name in alignments]))


def test_mismatch_weights_of_arms_share_a_unit_and_prox_ratios_keep_their_own(make_run):
    arms = arms_of(make_run, "aligned", "rollout_only")  # tbpo clips responses, grpo_tis tokens
    assert [item.unit for item in prox_ratios(arms)] == ["response", "token"]
    aligned, rollout_only = mismatch_weights(arms)
    assert (aligned.unit, rollout_only.unit) == ("response", "response")
    assert aligned.lines["positive"] == (0.5, 2.0)
    assert rollout_only.lines["positive"] == EVERYTHING
    assert mismatch_weights(arms[1:])[0].unit == "token"
    assert rollout_only.by_sign["negative"].std() > 100 * aligned.by_sign["negative"].std()


def test_ratios_are_split_by_the_sign_of_the_advantage(make_run):
    (arm,) = arms_of(make_run, "aligned")
    arrays = arm.runs[0].diagnostics.arrays
    (collected,) = prox_ratios([arm])
    assert np.array_equal(collected.by_sign["positive"], arrays["seq_prox_ratio"][arrays["seq_advantage"] > 0])
    assert np.array_equal(collected.by_sign["negative"], arrays["seq_prox_ratio"][arrays["seq_advantage"] < 0])


def test_ratios_of_tokens_are_of_the_learner_to_what_was_before(make_run):
    (arm,) = arms_of(make_run, "rollout_only")
    arrays = arm.runs[0].diagnostics.arrays
    curr, prev, generation = (arrays[f"token_{name}_logprob"] for name in ("curr", "prev", "generation"))
    positive = arrays["token_advantage"] > 0
    np.testing.assert_allclose(prox_ratios([arm])[0].by_sign["positive"], np.exp(curr - prev)[positive], rtol=1e-5)
    np.testing.assert_allclose(
        mismatch_weights([arm])[0].by_sign["positive"], np.exp(prev - generation)[positive], rtol=1e-5
    )


def test_scatter_shows_every_token_in_the_colour_of_its_sign(make_run):
    (arm,) = arms_of(make_run, "aligned")
    arrays = arm.runs[0].diagnostics.arrays
    zero, signed = scatter_figure([arm], 6, x="prev", y="curr", labels=("old", "new")).axes[0].collections
    assert len(zero.get_offsets()) == (arrays["token_advantage"] == 0).sum()
    assert to_hex(zero.get_facecolors()[0]) == ZERO_COLOR.lower()
    advantage = arrays["token_advantage"][arrays["token_advantage"] != 0]
    expected = [to_rgba(SIGN_COLORS["positive" if value > 0 else "negative"])[:3] for value in advantage]
    assert np.allclose(signed.get_facecolors()[:, :3], expected)
    prev = np.exp(arrays["token_prev_logprob"][arrays["token_advantage"] != 0].astype(float))
    assert np.allclose(signed.get_offsets()[:, 0], np.clip(prev, 1e-7, 1))


def test_time_outside_the_phases_is_other(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "timing/refit_s": 1, "timing/rollout_s": 3, "timing/step_s": 5, "timing/extra_s": 0.5}\n'
        '{"step": 2, "timing/refit_s": 1, "timing/rollout_s": 2, "timing/step_s": 3}\n'
    )
    (run,) = load_runs([tmp_path])
    phases = {name: values.tolist() for name, values in phase_seconds(run).items()}
    assert phases == {"rollout": [3, 2], "refit": [1, 1], "extra": [0.5, 0], "other": [0.5, 0]}
    assert list(phases) == ["rollout", "refit", "extra", "other"]
    # 8 s in all: rollout 5, refit 2, extra 0.5, other 0.5
    assert [row["share"] for row in phase_table([run])] == [0.625, 0.25, 0.0625, 0.0625]
