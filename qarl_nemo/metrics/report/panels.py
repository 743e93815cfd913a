"""Panels: a figure with its title and caption, or what to look for where a run has no data for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from matplotlib.figure import Figure

from qarl_nemo.metrics.report import curves, distributions, positions, scatter
from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.distributions import Ratios
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


def histogram_panel(ratios: Sequence[Ratios], quantity: str, line_name: str, title: str, caption: str) -> Panel:
    """Build a panel of histograms, one column per arm.

    Args:
        ratios: what each arm's histogram shows.
        quantity: name of the ratio.
        line_name: what the shaded interval is called.
        title: heading.
        caption: how to read it; the step is added.
    """
    figures = [distributions.histogram_figure(row, quantity, line_name, _width_in(row)) for row in _rows_of(ratios)]
    return _distribution_panel([item.arm for item in ratios], title, caption, figures)


def scatter_panel(
    arms: Sequence[Arm], policies: tuple[str, str], labels: tuple[str, str], title: str, caption: str
) -> Panel:
    """Build a panel of scatters of token probabilities, one column per arm.

    Args:
        arms: arms with diagnostics.
        policies: the two of prev, curr, generation on x and y.
        labels: axis labels.
        title: heading.
        caption: how to read it; the step is added.
    """
    figures = [scatter.scatter_figure(row, *policies, labels, _width_in(row)) for row in _rows_of(arms)]
    return _distribution_panel(arms, title, caption, figures)


def position_panel(arms: Sequence[Arm], title: str, caption: str) -> Panel:
    """Build a panel of the error tokens' positions.

    Args:
        arms: arms with counts by position.
        title: heading.
        caption: how to read it; the step is added.
    """
    figures = [positions.error_position_figure(arms, _width_in(arms))] if arms else []
    return _distribution_panel(arms, title, caption, figures)


def _distribution_panel(arms: Sequence[Arm], title: str, caption: str, figures: Sequence[Figure]) -> Panel:
    steps = {run.diagnostics.step for arm in arms for run in arm.runs if run.diagnostics is not None}
    when = f" At step {' / '.join(map(str, sorted(steps)))}."
    return Panel(title, caption + when, tuple(map(figure_uri, figures)), len(arms) > 1, _NEEDS_DIAGNOSTICS)


def _rows_of(items: Sequence[Item]) -> list[Sequence[Item]]:
    return [items[start : start + MAX_COLUMNS] for start in range(0, len(items), MAX_COLUMNS)]


def _width_in(columns: Sequence[object]) -> float:
    return FULL_WIDTH_IN if len(columns) > 1 else HALF_WIDTH_IN
