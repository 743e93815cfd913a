"""One look for every figure: palette, typography, and figures as self-contained data URIs. Nothing here uses pyplot."""

import base64
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

# Of formats, in the order in which a figure shows them.
FORMAT_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#999933")
SIGN_COLORS = {"positive": "#0072B2", "negative": "#D55E00"}
SIGN_LABELS = {"positive": "A > 0", "negative": "A < 0"}
ZERO_COLOR, ZERO_LABEL = "#B4BCC4", "A = 0"
PHASE_COLORS = {
    "rollout": "#332288",
    "reward": "#88CCEE",
    "prev_logprobs": "#44AA99",
    "update": "#DDCC77",
    "refit": "#CC6677",
}
EXTRA_PHASE_COLORS = ("#117733", "#882255", "#999933", "#AA4499")
OTHER_COLOR = "#C8CDD3"
INK, MUTED, GRID = "#1F2933", "#5B6670", "#E4E7EB"
HALF_WIDTH_IN, FULL_WIDTH_IN = 6.4, 13.0
MAX_COLUMNS = 4

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#9AA5B1",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.9,
    "figure.facecolor": "white",
    # Glyphs as outlines look the same on every machine; with a fixed salt the same run gives the same bytes.
    "svg.fonttype": "path",
    "svg.hashsalt": "qarl",
}


@contextmanager
def report_style() -> Iterator[None]:
    """Apply the look to figures drawn and saved inside the block."""
    with matplotlib.rc_context(_RC):
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """Create an empty figure whose layout keeps labels from overlapping."""
    return Figure(figsize=(width_in, height_in), layout="constrained", dpi=150)


def figure_uri(figure: Figure) -> str:
    """Encode a figure as an SVG data URI; rasterized artists inside it become PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def format_number(value: float) -> str:
    """Format a number for people: three significant digits, two with an exponent, a dash for NaN."""
    if not math.isfinite(value):
        return "-"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    decimals = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def format_duration(seconds: float) -> str:
    """Format seconds as `41 s`, `2 min 05 s` or `3 h 12 min`; a dash for NaN."""
    if not math.isfinite(seconds):
        return "-"
    total = round(seconds)
    if total < 60:
        return f"{seconds:.3g} s" if total < 10 else f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def percent_axis(axes: Axes) -> None:
    """Write the y axis, a fraction, in percent."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def step_axis(axes: Axes) -> None:
    """Label the x axis as training steps, with whole numbers."""
    axes.set_xlabel("training step")
    # With more ticks at least than one, a single step would stand between fractions.
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))


def log_ticks(axis: Axis) -> None:
    """Give a logarithmic axis few labels: powers of ten, or finer ones where it spans less than two decades."""
    low, high = sorted(axis.get_view_interval())
    if high < 10 * low:
        ticks = MaxNLocator(nbins=5).tick_values(low, high)
        axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
    axis.set_minor_formatter(NullFormatter())


def thousands_axis(axes: Axes) -> None:
    """Write the y axis as 1 k, 1.5 M."""
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))


def _power_of_ten(value: float) -> str:
    if 1e-2 <= value < 1e4:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = value / 10**exponent
    prefix = "" if round(factor, 6) == 1 else rf"{factor:g} \times "
    return rf"${prefix}10^{{{exponent}}}$"
