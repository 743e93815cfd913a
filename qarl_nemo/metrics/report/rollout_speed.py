"""One picture of rollout speeds: tokens/s and speed-up by batch size, and what the weights leave for the KV cache."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from qarl_formats import BASELINE, FORMAT_NAMES
from qarl_nemo.metrics.report.style import FORMAT_COLORS, INK, MUTED, new_figure, report_style, thousands_axis

Row = Mapping[str, Any]
_WIDTH_IN, _HEIGHT_IN, _DPI = 14.0, 4.6, 160
_QUANTIZED = (name for name in FORMAT_NAMES if name != BASELINE)
_COLORS = {BASELINE: INK} | dict(zip(_QUANTIZED, cycle(FORMAT_COLORS), strict=False))


def write_rollout_speed_figure(rows: Sequence[Row], png_path: Path, title: str) -> Path:
    """Write one PNG of three panels; bars on the points of the first two are the noise.

    Args:
        rows: rows of `qarl doctor --rollout`: format_name, batch_size, decode_tokens_s, decode_noise, speedup,
            weights_gib and kv_cache_tokens.
        png_path: file to write; its folder must exist.
        title: heading.

    Returns:
        `png_path`.
    """
    by_format: dict[str, list[Row]] = {}
    for row in rows:
        by_format.setdefault(row["format_name"], []).append(row)
    with report_style():
        figure = new_figure(_WIDTH_IN, _HEIGHT_IN)
        speed, speedup, memory = figure.subplots(1, 3)
        for name, shown in by_format.items():
            _draw(speed, name, shown, 1.0)
            baseline = [row["decode_tokens_s"] / row["speedup"] for row in shown if row["speedup"]]
            if len(baseline) == len(shown):
                _draw(speedup, name, shown, baseline)
        sizes = sorted({row["batch_size"] for row in rows})
        for axes, heading in ((speed, "Decoding, tokens/s"), (speedup, "Decoding, speed-up over bf16")):
            axes.set_title(heading)
            axes.set(xlabel="batch size", xscale="log", ylim=(0, None))
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.margins(x=0.1)
        thousands_axis(speed)
        _draw_memory(memory, {name: shown[-1] for name, shown in by_format.items()})
        handles, labels = speed.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels))
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.savefig(png_path, dpi=_DPI)
    return png_path


def _draw(axes: Axes, name: str, rows: Sequence[Row], divisor: float | Sequence[float]) -> None:
    divisors = [divisor] * len(rows) if isinstance(divisor, float) else divisor
    middle = [row["decode_tokens_s"] / by for row, by in zip(rows, divisors, strict=True)]
    noise = [row["decode_noise"] / by for row, by in zip(rows, divisors, strict=True)]
    sizes = [row["batch_size"] for row in rows]
    axes.errorbar(sizes, middle, yerr=noise, marker="o", markersize=5, capsize=4, color=_COLORS[name], label=name)


def _draw_memory(axes: Axes, rows: Mapping[str, Row]) -> None:
    places = range(len(rows))
    axes.barh(places, [row["weights_gib"] for row in rows.values()], color=[_COLORS[name] for name in rows], height=0.6)
    axes.set_yticks(list(places), list(rows))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Weights of a GPU, and KV cache beside them")
    axes.set_xlabel("GiB")
    axes.margins(x=0.5)
    for place, row in zip(places, rows.values(), strict=True):
        text = f"{row['weights_gib']:.3g} GiB; cache of\n{row['kv_cache_tokens'] / 1000:,.0f} k tokens"
        axes.annotate(
            text, (row["weights_gib"], place), (5, 0), textcoords="offset points", va="center", color=MUTED, fontsize=9
        )
