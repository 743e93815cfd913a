"""Panels: a figure with its title and caption, or what to look for where a run has no data for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from matplotlib.figure import Figure

from qarl_nemo.metrics.report import curves
from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.style import FULL_WIDTH_IN, HALF_WIDTH_IN, MAX_COLUMNS, figure_uri

Item = TypeVar("Item")
_NEEDS_DIAGNOSTICS = "Not recorded, or not yet, in diagnostics/step_*.npz."


@dataclass(frozen=True, slots=True)
class Panel:
    """A titled figure: `images` are data URIs, `missing` says what to look for when there are none."""

    title: str
    caption: str
    images: tuple[str, ...]
    wide: bool
    missing: str


def figure_panel(title: str, caption: str, figure: Figure | None, missing: str, *, wide: bool = False) -> Panel:
    """Build a panel of one figure, or of none.

    Args:
        title: heading.
        caption: how to read it.
        figure: the figure, None when its data were not recorded.
        missing: what was looked for.
        wide: spans both columns of the page.
    """
    return Panel(title, caption, (figure_uri(figure),) if figure else (), wide, missing)


def curve_panel(arms: Sequence[Arm], title: str, key: str, ylabel: str, caption: str, **options: bool) -> Panel:
    """Build a half-width panel of one metric over training steps.

    Args:
        arms: what is compared.
        title: heading.
        key: key of metrics.jsonl.
        ylabel: axis label with unit.
        caption: how to read it.
        options: log, percent, smooth of `curve_figure`.
    """
    figure = curves.curve_figure(arms, key, ylabel, **options)
    return figure_panel(title, caption, figure, f"Not recorded: {key} in metrics.jsonl.")


def diagnostics_panel(arms: Sequence[Arm], title: str, caption: str, figures: Sequence[Figure]) -> Panel:
    """Build a panel of the newest diagnostics.

    Args:
        arms: whose they are.
        title: heading.
        caption: how to read it; the step is added.
        figures: one below the other; none where nothing was recorded.
    """
    steps = {run.diagnostics.step for arm in arms for run in arm.runs if run.diagnostics is not None}
    when = f" At step {' / '.join(map(str, sorted(steps)))}."
    return Panel(title, caption + when, tuple(map(figure_uri, figures)), len(arms) > 1, _NEEDS_DIAGNOSTICS)


def in_rows(draw: Callable[[Sequence[Item], float], Figure], columns: Sequence[Item]) -> list[Figure]:
    """Draw columns, at most MAX_COLUMNS of them in a figure, given with its width in inches."""
    rows = (columns[start : start + MAX_COLUMNS] for start in range(0, len(columns), MAX_COLUMNS))
    return [draw(row, width_in(row)) for row in rows]


def width_in(columns: Sequence[object]) -> float:
    """Return the width of a figure with so many columns, inches."""
    return FULL_WIDTH_IN if len(columns) > 1 else HALF_WIDTH_IN
