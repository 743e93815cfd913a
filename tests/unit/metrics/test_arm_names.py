"""Arms are called what their user called them, also where matplotlib would read a formula."""

import pytest

from qarl_nemo.metrics.report import write_report
from qarl_nemo.metrics.report.arms import group_by_arm
from qarl_nemo.metrics.report.curves import curve_figure
from qarl_nemo.metrics.runs import load_runs


@pytest.mark.parametrize("arm", [r"a $\frac$ of b", "$5 and $9", "_plain"])
def test_names_of_arms_are_drawn_as_they_are(arm, make_run, tmp_path):
    runs = [make_run("one", arm=arm), make_run("two", arm="other")]
    write_report(runs, tmp_path / "report.html")
    figure = curve_figure(group_by_arm(load_runs(runs)), "reward/mean", "reward")
    figure.axes[0].legend()
    first, _ = figure.axes[0].get_legend().get_texts()
    text, is_formula = first._preprocess_math(first.get_text())
    assert (text.strip(), is_formula) == (arm, False)
