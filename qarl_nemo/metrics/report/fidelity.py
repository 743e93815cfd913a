"""One picture of a comparison of learner and engine: the gap by place in the response, and its distribution."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from qarl_formats import BASELINE
from qarl_nemo.metrics.report.style import FORMAT_COLORS, INK, log_ticks, new_figure, percent_axis, report_style

Row = Mapping[str, Any]
_WIDTH_IN, _ROW_HEIGHT_IN, _DPI = 12.0, 3.9, 160
_DASHES = {"aligned": "-", "rollout_only": (0, (5, 2)), BASELINE: (0, (1, 1))}
_LABELS = {
    "aligned": "aligned",
    "rollout_only": "rollout only",
    BASELINE: "floor: both BF16",
}
_SMALLEST_GAP = 1e-8


def write_fidelity_figure(rows: Sequence[Row], png_path: Path, title: str) -> Path:
    """Write one PNG with a row of two panels for each decoding; the BF16 floor is dotted.

    Args:
        rows: rows of `qarl compare`: arm, format, decoding, by_position and gap_cdf.
        png_path: file to write; its folder must exist.
        title: heading.

    Returns:
        `png_path`.
    """
    decodings = list(dict.fromkeys(row["decoding"] for row in rows))
    formats = [name for name in dict.fromkeys(row["format"] for row in rows) if name != BASELINE]
    colors = dict(zip(formats, cycle(FORMAT_COLORS), strict=False))
    with report_style():
        figure = new_figure(_WIDTH_IN, _ROW_HEIGHT_IN * len(decodings) + 0.8)
        grid = figure.subplots(len(decodings), 2, squeeze=False)
        for decoding, (by_position, distribution) in zip(decodings, grid, strict=True):
            shown = [row for row in rows if row["decoding"] == decoding and row["arm"] in _LABELS]
            for row in shown:
                _draw_positions(by_position, row, colors)
                _draw_distribution(distribution, row, colors)
            _finish(by_position, distribution, decoding)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.savefig(png_path, dpi=_DPI)
    return png_path


def _style(row: Row, colors: Mapping[str, str]) -> dict[str, Any]:
    label = _LABELS[row["arm"]] + ("" if row["arm"] == BASELINE else f", {row['format']}")
    return {"color": colors.get(row["format"], INK), "linestyle": _DASHES[row["arm"]], "label": label}


def _draw_positions(axes: Axes, row: Row, colors: Mapping[str, str]) -> None:
    intervals = row["by_position"]
    centers = [1 + (interval["first"] + interval["last"]) / 2 for interval in intervals]
    gaps = [max(interval["gap_mean"], _SMALLEST_GAP) for interval in intervals]
    axes.plot(centers, gaps, marker="o", markersize=3, **_style(row, colors))


def _draw_distribution(axes: Axes, row: Row, colors: Mapping[str, str]) -> None:
    gaps = np.maximum(np.asarray(row["gap_cdf"], dtype=float), _SMALLEST_GAP)
    if len(gaps):
        axes.plot(gaps, np.linspace(0, 1, len(gaps)), **_style(row, colors))


def _finish(by_position: Axes, distribution: Axes, decoding: str) -> None:
    by_position.set_title(f"Gap by position, {decoding} responses")
    by_position.set(xlabel="response token", ylabel="mean |gap| (nats)", yscale="log")
    by_position.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    log_ticks(by_position.yaxis)
    distribution.set_title(f"Distribution, {decoding} responses")
    distribution.set(xlabel="|gap| (nats)", ylabel="share of tokens at or below", xscale="log")
    log_ticks(distribution.xaxis)
    percent_axis(distribution)
