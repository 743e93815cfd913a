"""Scatters of one step: a token's probability under two policies."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.style import INK, SIGN_COLORS, SIGN_LABELS, ZERO_COLOR, ZERO_LABEL, log_ticks, new_figure
from qarl_nemo.metrics.runs import Floats

_LOWEST_PROB = 1e-7


def scatter_figure(arms: Sequence[Arm], width_in: float, *, x: str, y: str, labels: tuple[str, str]) -> Figure:
    """Draw token probabilities under two policies against each other, log-log, coloured by advantage sign.

    Args:
        arms: at most MAX_COLUMNS arms with diagnostics.
        width_in: width, inches.
        x: prev, curr or generation.
        y: like x.
        labels: axis labels.
    """
    figure = new_figure(width_in, 4.6)
    grid = figure.subplots(1, len(arms), squeeze=False, sharex=True, sharey=True)[0]
    lowest = min(np.nanmin(_probabilities(arm, name), initial=0.5) for arm in arms for name in (x, y))
    for axes, arm in zip(grid, arms, strict=True):
        advantage = arm.diagnostic("token_advantage")
        signed = np.where(advantage > 0, SIGN_COLORS["positive"], SIGN_COLORS["negative"])
        for chosen, colors in ((advantage == 0, np.full(len(advantage), ZERO_COLOR)), (advantage != 0, signed)):
            points = (_probabilities(arm, name)[chosen] for name in (x, y))
            axes.scatter(*points, c=colors[chosen], s=7, alpha=0.45, linewidths=0, rasterized=True)
        axes.plot([lowest / 2, 1.6], [lowest / 2, 1.6], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set(xscale="log", yscale="log", xlabel=labels[0], xlim=(lowest / 2, 1.6), ylim=(lowest / 2, 1.6))
        log_ticks(axes.xaxis)
        log_ticks(axes.yaxis)
        if len(arms) > 1:
            axes.set_title(arm.label, color=arm.color)
    grid[0].set_ylabel(labels[1])
    legend = {SIGN_LABELS[sign]: color for sign, color in SIGN_COLORS.items()} | {ZERO_LABEL: ZERO_COLOR}
    handles = [grid[0].plot([], [], "o", color=color, markersize=5, label=label)[0] for label, color in legend.items()]
    grid[0].legend(handles=handles, loc="upper left", handletextpad=0.2)
    return figure


def _probabilities(arm: Arm, policy: str) -> Floats:
    # A log-probability that is no number has no place; it must not take the axes with it.
    return np.exp(np.clip(arm.diagnostic(f"token_{policy}_logprob"), np.log(_LOWEST_PROB), 0.0))
