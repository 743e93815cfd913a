"""Where the time goes: seconds per phase, and tokens per second."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.curves import add_legend, draw_curves, finish_curves, has_values, thin_out
from qarl_nemo.metrics.report.style import (
    EXTRA_PHASE_COLORS,
    HALF_WIDTH_IN,
    OTHER_COLOR,
    PHASE_COLORS,
    new_figure,
    step_axis,
    thousands_axis,
)
from qarl_nemo.metrics.runs import Floats, Run

_THROUGHPUTS = {"throughput/rollout_tokens_s": "rollout", "throughput/update_tokens_s": "update"}


def phase_seconds(run: Run) -> dict[str, Floats]:
    """Return [S] seconds per phase in the order phases run, with `other` for the rest of the step."""
    timed = {key.removeprefix("timing/").removesuffix("_s"): key for key in run.columns if key.startswith("timing/")}
    step_key = timed.pop("step", None)
    ordered = [name for name in PHASE_COLORS if name in timed] + [name for name in timed if name not in PHASE_COLORS]
    phases = {name: np.nan_to_num(run.column(timed[name])) for name in ordered}
    if step_key and phases:
        phases["other"] = np.maximum(np.nan_to_num(run.column(step_key)) - sum(phases.values()), 0.0)
    return phases


def phase_figure(arms: Sequence[Arm]) -> Figure | None:
    """Draw phase timings: over the steps for one run, else as mean seconds per step and arm; None if untimed."""
    per_arm = {arm.label: _mean_phases(arm) for arm in arms}
    names = list(dict.fromkeys(name for phases in per_arm.values() for name in phases))
    if not names:
        return None
    names.sort(key=lambda name: name == "other")
    colors = _phase_colors(names)
    # One step has no width to stack an area over.
    single = arms[0].runs[0] if len(arms) == 1 and len(arms[0].runs) == 1 and len(arms[0].runs[0].steps) > 1 else None
    figure = new_figure(HALF_WIDTH_IN, 3.3 if single else 1.5 + 0.45 * len(arms))
    axes = figure.subplots()
    if single:
        phases = phase_seconds(single)
        steps, *values = thin_out(single.steps, *(phases[name] for name in names))
        axes.stackplot(steps, values, colors=[colors[name] for name in names], labels=names, linewidth=0)
        axes.set_ylabel("time per step (s)")
        axes.margins(x=0, y=0.02)
        # The first step compiles and warms up; its length must not flatten the others.
        axes.set_ylim(0, 1.25 * np.quantile(sum(values), 0.98))
        step_axis(axes)
    else:
        left = np.zeros(len(arms))
        for name in names:
            widths = np.array([phases.get(name, 0.0) for phases in per_arm.values()])
            axes.barh(list(per_arm), widths, left=left, color=colors[name], label=name, height=0.62)
            left += widths
        axes.set_xlabel("mean time per step (s)")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    add_legend(axes)
    return figure


def throughput_figure(arms: Sequence[Arm]) -> Figure | None:
    """Draw tokens per second of rollout (solid) and update (dashed); None when it was not measured."""
    if not any(has_values(arms, key) for key in _THROUGHPUTS):
        return None
    figure = new_figure(HALF_WIDTH_IN, 3.3)
    for axes, (key, phase) in zip(figure.subplots(1, 2), _THROUGHPUTS.items(), strict=True):
        draw_curves(axes, arms, key)
        finish_curves(axes, f"{phase} (tokens/s)")
        axes.set_ylim(bottom=0)
        thousands_axis(axes)
    return figure


def phase_table(runs: Sequence[Run]) -> list[dict[str, float | str]]:
    """Add up seconds per phase over whole runs: run, phase, seconds and share of the run's timed seconds."""
    rows: list[dict[str, float | str]] = []
    for run in runs:
        totals = {name: float(values.sum()) for name, values in phase_seconds(run).items()}
        whole = sum(totals.values())
        rows += [
            {"run": run.name, "phase": name, "seconds": seconds, "share": seconds / whole if whole > 0 else 0.0}
            for name, seconds in totals.items()
        ]
    return rows


def _mean_phases(arm: Arm) -> dict[str, float]:
    means: dict[str, list[float]] = {}
    for run in arm.runs:
        for name, values in phase_seconds(run).items():
            means.setdefault(name, []).append(float(values.mean()))
    return {name: float(np.mean(values)) for name, values in means.items()}


def _phase_colors(names: Sequence[str]) -> dict[str, str]:
    extra = iter(EXTRA_PHASE_COLORS * len(names))
    return {name: OTHER_COLOR if name == "other" else PHASE_COLORS.get(name) or next(extra) for name in names}
