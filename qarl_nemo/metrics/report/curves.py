"""Curves over training steps: one line per arm, moving means, ranges over seeds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qarl_nemo.metrics.report.arms import Arm, finite_points
from qarl_nemo.metrics.report.style import HALF_WIDTH_IN, MUTED, log_ticks, new_figure, percent_axis, step_axis
from qarl_nemo.metrics.runs import Floats

MAX_POINTS = 400


def curve_figure(
    arms: Sequence[Arm],
    key: str,
    ylabel: str,
    *,
    log: bool = False,
    percent: bool = False,
    smooth: bool = True,
) -> Figure | None:
    """Draw one metric over training steps: moving mean per arm, every step faintly behind, range over seeds shaded.

    Args:
        arms: what is compared.
        key: key of metrics.jsonl.
        ylabel: axis label with unit.
        log: logarithmic y axis, unless all is zero; zero is drawn below the smallest other value, on a line named so.
        percent: the metric is a fraction, shown in percent.
        smooth: draw the moving mean.

    Returns:
        The figure, or None when no run has a value.
    """
    if not has_values(arms, key):
        return None
    figure = new_figure(HALF_WIDTH_IN, 3.3)
    axes = figure.subplots()
    draw_curves(axes, arms, key, log=log, smooth=smooth)
    finish_curves(axes, ylabel, percent=percent)
    return figure


def reward_figure(arms: Sequence[Arm], width_in: float, height_in: float) -> Figure | None:
    """Draw reward over training steps with validation points; None without rewards."""
    if not has_values(arms, "reward/mean"):
        return None
    figure = new_figure(width_in, height_in)
    axes = figure.subplots()
    draw_rewards(axes, arms)
    finish_curves(axes, "mean reward")
    return figure


def draw_rewards(axes: Axes, arms: Sequence[Arm]) -> None:
    """Draw training reward as curves and what the first validation set scored as points."""
    draw_curves(axes, arms, "reward/mean")
    for arm in arms:
        first = next(iter(arm.runs[0].score_columns().values()))
        steps, mean, low, high = arm.curve(first, smooth=False)
        if not len(steps):
            continue
        if len(arm.runs) > 1:
            axes.vlines(steps, low, high, color=arm.color, linewidth=1.2)
        fill, edge = ("white", arm.color) if arm.dashed else (arm.color, "white")
        axes.plot(steps, mean, "o", color=fill, markeredgecolor=edge, markersize=7, zorder=4)


def draw_curves(axes: Axes, arms: Sequence[Arm], key: str, *, log: bool = False, smooth: bool = True) -> None:
    """Draw one metric of every arm on given axes."""
    lowest = _set_log_scale(axes, arms, key) if log else -np.inf
    for arm in arms:
        steps, mean, low, high = thin_out(*arm.curve(key, smooth=smooth))
        mean, low, high = (np.maximum(values, lowest) for values in (mean, low, high))
        if not len(steps):
            continue
        if len(arm.runs) > 1:
            axes.fill_between(steps, low, high, color=arm.color, alpha=0.16, linewidth=0)
        else:
            raw_steps, raw = thin_out(*finite_points(arm.runs[0], key))
            axes.plot(raw_steps, np.maximum(raw, lowest), color=arm.color, alpha=0.25, linewidth=0.9)
        seeds = f" ({len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""
        marker = "o" if len(steps) == 1 else None
        style = "--" if arm.dashed else "-"
        axes.plot(steps, mean, style, color=arm.color, marker=marker, label=arm.label + seeds)


def finish_curves(axes: Axes, ylabel: str, *, percent: bool = False, legend: bool = False) -> None:
    """Label axes of curves; the legend goes above the data, where it covers none."""
    axes.set_ylabel(ylabel)
    step_axis(axes)
    if axes.get_yscale() == "log":
        log_ticks(axes.yaxis)
    if percent:
        percent_axis(axes)
    if legend:
        add_legend(axes)


def add_legend(axes: Axes) -> None:
    """Put a legend above the axes."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.3, handlelength=1.6)


def thin_out(*columns: Floats) -> tuple[Floats, ...]:
    """Keep at most MAX_POINTS evenly spaced points, the last one always, so that long runs make small pages."""
    count = len(columns[0])
    kept = np.unique(np.linspace(0, count - 1, min(count, MAX_POINTS)).round().astype(int))
    return tuple(column[kept] for column in columns)


def _set_log_scale(axes: Axes, arms: Sequence[Arm], key: str) -> float:
    """Make the y axis logarithmic if a value is positive, and return where zero is drawn."""
    values = np.concatenate([finite_points(run, key)[1] for arm in arms for run in arm.runs])
    positive = values[values > 0]
    if not len(positive):
        return -np.inf
    axes.set_yscale("log")
    floor = float(positive.min()) / 3
    if len(positive) < len(values):
        axes.axhline(floor, color=MUTED, linewidth=0.8, linestyle=(0, (1, 3)), zorder=0)
        place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        axes.text(1, floor, "zero", fontsize=8.5, color=MUTED, **place)
    return floor


def has_values(arms: Sequence[Arm], key: str) -> bool:
    """Tell whether some run has a finite value of a metric."""
    return any(len(finite_points(run, key)[0]) for arm in arms for run in arm.runs)
