"""Histograms of one step: prox ratios and mismatch weights by advantage sign, with the objective's lines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.bands import Interval, ObjectiveBands, objective_bands
from qarl_nemo.metrics.report.style import INK, MUTED, SIGN_COLORS, SIGN_LABELS, log_ticks, new_figure, percent_axis
from qarl_nemo.metrics.runs import Floats

_BINS = 48
_SMALLEST_SPAN = 1e-6
# A line farther away than this many half-widths of the data is named, not drawn: it would squeeze the data to a spike.
_LINE_REACH = 4.0
_LOG_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of one arm at its newest diagnostics, by advantage sign, with the lines of its objective.

    Attributes:
        arm: the arm; runs of several seeds are pooled.
        unit: response or token.
        by_sign: finite ratios where the advantage is positive and negative.
        lines: interval drawn, by sign.
    """

    arm: Arm
    unit: str
    by_sign: dict[str, Floats]
    lines: dict[str, Interval]


def prox_ratios(arms: Sequence[Arm]) -> list[Ratios]:
    """Collect prox ratios exp(curr - prev) per response or per token, as each arm's objective clips them."""
    collected = []
    for arm in arms:
        bands = _bands(arm)
        values = _values(arm, bands.unit, "seq_prox_ratio", ("token_curr_logprob", "token_prev_logprob"))
        collected.append(Ratios(arm, bands.unit, values, bands.prox))
    return collected


def mismatch_weights(arms: Sequence[Arm]) -> list[Ratios]:
    """Collect mismatch weights exp(prev - generation), all arms in one unit so that they compare.

    The unit is the response, unless every arm's objective works on tokens. An objective's cap is drawn only over
    weights of its own unit.
    """
    bands = [_bands(arm) for arm in arms]
    unit = "token" if all(item.unit == "token" for item in bands) else "response"
    collected = []
    for arm, item in zip(arms, bands, strict=True):
        values = _values(arm, unit, "seq_mismatch_weight", ("token_prev_logprob", "token_generation_logprob"))
        cap = item.mismatch if item.unit == unit else (0.0, np.inf)
        collected.append(Ratios(arm, unit, values, dict.fromkeys(SIGN_COLORS, cap)))
    return collected


def histogram_figure(panels: Sequence[Ratios], width_in: float, *, quantity: str, line_name: str) -> Figure:
    """Draw a histogram per arm (column) and advantage sign (row); the shaded interval is the objective's.

    Panels of the same unit share their x axis, so that spreads compare by eye.

    Args:
        panels: at most MAX_COLUMNS arms.
        width_in: width, inches.
        quantity: name of the ratio.
        line_name: what the interval is called: band or cap.
    """
    figure = new_figure(width_in, 4.6)
    grid = figure.subplots(2, len(panels), squeeze=False)
    scales = {unit: _Scale.of([panel for panel in panels if panel.unit == unit]) for unit in {p.unit for p in panels}}
    for column, panel in enumerate(panels):
        scale = scales[panel.unit]
        for axes, sign in zip(grid[:, column], SIGN_COLORS, strict=True):
            _draw_histogram(axes, panel.by_sign[sign], panel.lines[sign], scale, SIGN_COLORS[sign])
            _annotate(axes, panel, sign, scale, line_name)
        grid[0, column].tick_params(labelbottom=False)
        grid[1, column].set_xlabel(scale.label(f"{quantity} per {panel.unit}"))
        if len(panels) > 1:
            grid[0, column].set_title(panel.arm.label, color=panel.arm.color, pad=28)
    for axes, sign in zip(grid[:, 0], SIGN_COLORS, strict=True):
        axes.set_ylabel(f"{SIGN_LABELS[sign]}: share")
    return figure


@dataclass(frozen=True, slots=True)
class _Scale:
    """x axis of histograms: ratio - 1 in a power of ten, or the ratio itself on a log axis when it spreads widely."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, panels: Sequence[Ratios]) -> "_Scale":
        values = np.concatenate([part for panel in panels for part in panel.by_sign.values()])
        low, high = np.quantile(values, [0.005, 0.995]) if len(values) else (1.0, 1.0)
        reach = _LINE_REACH * max(high - 1, 1 - low, _SMALLEST_SPAN)
        lines = [line for panel in panels for interval in panel.lines.values() for line in interval]
        near = [line for line in lines if line > 0 and abs(line - 1) <= reach]
        low, high = min(low, *near, 1 - _SMALLEST_SPAN), max(high, *near, 1 + _SMALLEST_SPAN)
        if low > 0 and high / low > _LOG_FACTOR:
            return cls(low / 1.1, high * 1.1, True)
        margin = 0.06 * (high - low)
        return cls(low - margin, high + margin, False)

    @property
    def edges(self) -> Floats:
        return (np.geomspace if self.log else np.linspace)(self.low, self.high, _BINS + 1)

    @property
    def exponent(self) -> int:
        return int(np.floor(np.log10(max(abs(self.low - 1), abs(self.high - 1)))))

    def label(self, quantity: str) -> str:
        return quantity if self.log else rf"{quantity} $-\,1$  ($\times 10^{{{self.exponent}}}$)"

    def apply(self, axes: Axes) -> None:
        axes.set_xlim(self.low, self.high)
        if self.log:
            axes.set_xscale("log")
            log_ticks(axes.xaxis)
            return
        unit = 10.0**self.exponent
        step = MaxNLocator(nbins=5).tick_values((self.low - 1) / unit, (self.high - 1) / unit)
        axes.set_xticks([1 + value * unit for value in step if self.low <= 1 + value * unit <= self.high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round((value - 1) / unit, 3):g}"))


def _draw_histogram(axes: Axes, values: Floats, lines: Interval, scale: _Scale, color: str) -> None:
    scale.apply(axes)
    inside = np.clip(values, scale.low, scale.high)
    shares = np.full(len(values), 1 / max(len(values), 1))
    heights, edges = np.histogram(inside, scale.edges, weights=shares)
    axes.stairs(heights, edges, fill=True, color=color, alpha=0.85)
    bounded = [line for line in lines if 0 < line < np.inf]
    if bounded:
        axes.axvspan(
            max(lines[0], scale.low), min(lines[1], scale.high), color=color, alpha=0.08, linewidth=0, zorder=0
        )
    for line in bounded:
        if scale.low <= line <= scale.high:
            axes.axvline(line, color=INK, linewidth=1.2, linestyle=(0, (5, 3)))
    # Of no values, matplotlib would centre the axis on zero and show negative shares.
    axes.set_ylim(0, None if len(values) else 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    percent_axis(axes)


def _annotate(axes: Axes, panel: Ratios, sign: str, scale: _Scale, line_name: str) -> None:
    values, (low, high) = panel.by_sign[sign], panel.lines[sign]
    text = f"n = {len(values):,}"
    if (low > 0 or high < np.inf) and len(values):
        text += f", {100 * np.mean((values >= low) & (values <= high)):.3g} % in the {line_name}"
        hidden = [f"{line:.4g}" for line in (low, high) if 0 < line < np.inf and not scale.low <= line <= scale.high]
        if hidden:
            text += f"\n{line_name} at {' and '.join(hidden)}, off this axis"
    axes.text(1, 1.02, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8.5, color=MUTED)


def _bands(arm: Arm) -> ObjectiveBands:
    return objective_bands(arm.runs[0].config.get("loss_fn")) or ObjectiveBands()


def _values(arm: Arm, unit: str, sequence_field: str, token_fields: tuple[str, str]) -> dict[str, Floats]:
    if unit == "response":
        values, advantage = arm.diagnostic(sequence_field), arm.diagnostic("seq_advantage")
    else:
        values = np.exp(arm.diagnostic(token_fields[0]) - arm.diagnostic(token_fields[1]))
        advantage = arm.diagnostic("token_advantage")
    finite = np.isfinite(values)
    return {"positive": values[finite & (advantage > 0)], "negative": values[finite & (advantage < 0)]}
