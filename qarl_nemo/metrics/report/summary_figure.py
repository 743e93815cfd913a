"""One picture of a run or a comparison, for a README: reward, logprob gap, and what they do to the loss."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from qarl_nemo.metrics.report.arms import Arm, group_by_arm
from qarl_nemo.metrics.report.curves import draw_curves, draw_rewards, finish_curves, has_values
from qarl_nemo.metrics.report.distributions import mismatch_weights
from qarl_nemo.metrics.report.sign_curves import draw_signs
from qarl_nemo.metrics.report.style import (
    MUTED,
    SIGN_COLORS,
    log_ticks,
    new_figure,
    percent_axis,
    report_style,
)
from qarl_nemo.metrics.runs import load_runs

_SIZE_IN = (12.0, 4.1)
_DPI = 200
_SMALLEST_DEVIATION = 1e-7
_LEGEND_COLUMNS = 4


def write_summary_figure(run_dirs: Sequence[Path], png_path: Path, *, variant: str | None = None) -> Path:
    """Write one PNG: reward, mean |prev - generation| on a log axis, and responses by mismatch weight.

    For a single run the third panel is the share of responses in the objective's band, when it was recorded; for runs
    without diagnostics it is the gradient's norm.

    Args:
        run_dirs: run directories, as for `write_report`.
        png_path: file to write, 2400 x 820 pixels, to be shown at half of that; its folder is created.
        variant: what arms that are drawn as another, dashed, have after its name, see `group_by_arm`.

    Returns:
        `png_path`.

    Raises:
        ValueError: directories that are not runs, all named with what was looked for.
    """
    arms = group_by_arm(load_runs([Path(path) for path in run_dirs]), variant)
    with report_style():
        figure = new_figure(*_SIZE_IN)
        reward, gap, third = figure.subplots(1, 3)
        draw_rewards(reward, arms)
        finish_curves(reward, "mean reward")
        reward.set_title("Reward" + (" (points: validation)" if has_values(arms, "validation/reward") else ""))
        draw_curves(gap, arms, "mismatch/abs_gap_mean", log=True)
        finish_curves(gap, "mean |prev - generation| (nats)")
        gap.set_title("Logprob gap, learner to rollout")
        if len(arms) == 1 and has_values(arms, "band_share/in_band_positive"):
            _draw_band_shares(third, arms[0])
        else:
            _draw_mismatch_or_norm(third, arms)
        if len(arms) > 1:
            handles, labels = reward.get_legend_handles_labels()
            columns = len(arms) if len(arms) <= _LEGEND_COLUMNS else ceil(len(arms) / 2)
            figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=10.5)
        png_path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png_path, dpi=_DPI)
    return png_path


def _draw_band_shares(axes: Axes, arm: Arm) -> None:
    draw_signs(axes, arm, {sign: f"band_share/in_band_{sign}" for sign in SIGN_COLORS})
    finish_curves(axes, "share in the band", percent=True)
    axes.set_ylim(-0.03, 1.03)
    axes.set_title("Kept by the objective's band")
    axes.legend(loc="lower right")


def _draw_mismatch_or_norm(axes: Axes, arms: Sequence[Arm]) -> None:
    diagnosed = [arm for arm in arms if arm.has_diagnostic("seq_mismatch_weight")]
    if diagnosed:
        _draw_mismatch(axes, diagnosed)
    elif has_values(arms, "optim/grad_norm"):
        axes.set_title("Gradient norm")
        draw_curves(axes, arms, "optim/grad_norm")
        finish_curves(axes, "norm of the gradient")
    else:
        axes.set_title("Mismatch weight")
        axes.text(0.5, 0.5, "no diagnostics yet", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set(xticks=[], yticks=[])


def _draw_mismatch(axes: Axes, arms: Sequence[Arm]) -> None:
    axes.set_title("Mismatch weight")
    collected = mismatch_weights(arms)
    deviations = [np.abs(np.concatenate(list(ratios.by_sign.values())) - 1) for ratios in collected]
    deviations = [np.sort(np.maximum(values, _SMALLEST_DEVIATION)) for values in deviations]
    for ratios, values in zip(collected, deviations, strict=True):
        axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=ratios.arm.color)
    axes.set_xscale("log")
    unit = collected[0].unit
    axes.set(xlabel=f"|mismatch weight - 1| per {unit}", ylabel=f"share of {unit}s at or below")
    log_ticks(axes.xaxis)
    percent_axis(axes)
