"""Where in a response error tokens stand."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qarl_nemo.metrics.diagnostics import sum_positions
from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.style import new_figure, percent_axis

_MAX_INTERVALS = 24


def error_position_figure(arms: Sequence[Arm], width_in: float) -> Figure:
    """Draw error tokens per response token over intervals of positions; runs of several seeds are added up.

    Args:
        arms: arms whose diagnostics count tokens by position.
        width_in: width, inches.
    """
    figure = new_figure(width_in, 3.3)
    axes = figure.subplots()
    counts = [sum_positions(arm.each_diagnostic("position_tokens", "position_error_tokens")) for arm in arms]
    width = -(-max(part.shape[1] for part in counts) // _MAX_INTERVALS) or 1
    for arm, part in zip(arms, counts, strict=True):
        padded = np.pad(part, ((0, 0), (0, -part.shape[1] % width)))
        tokens, wrong = padded.reshape(2, -1, width).sum(-1)
        # Tokens are counted from 1.
        centers = width * (np.arange(len(tokens)) + 0.5) + 0.5
        axes.plot(centers, wrong / np.maximum(tokens, 1), marker="o", markersize=4, color=arm.color, label=arm.name)
    axes.set(xlabel="response token", ylabel="error tokens per token")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    percent_axis(axes)
    return figure
