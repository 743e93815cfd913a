"""What every program here takes, how it calls an arm, and its rows of several seeds."""

import argparse
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from qarl_nemo.metrics.estimate import mean_of
from qarl_nemo.metrics.results import Figure, ResultRow, read_results


def parser_of(description: str | None, results: str) -> argparse.ArgumentParser:
    """Return a parser with `--record`, whose default is docs/results/`results`.json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path(f"docs/results/{results}.json"), help="file to append to")
    return parser


def slug(text: str) -> str:
    """Return `text` as an identifier."""
    return re.sub(r"\W+", "_", text).lower()


def mean_figures(name: str, values: Iterable[float], unit: str = "", op: str = ">=") -> list[Figure]:
    """Return the mean of seeds, `name`_mean, and its standard error, `name`_error, which one seed has not."""
    mean = mean_of(values)
    return [
        Figure(f"{name}_mean", mean.value, unit, op),
        *([] if mean.standard_error is None else [Figure(f"{name}_error", mean.standard_error, unit, "<=")]),
    ]


def new_figures(path: Path, figures: Iterable[Figure]) -> Iterator[Figure]:
    """Yield figures that a results file lacks or has with another value; the rest keep the host that they ran on.

    Args:
        path: the file, whose values have five digits.
        figures: computed from rows of many runs, of which only some are recorded now.
    """
    held = {row.name: row.value for row in read_results(path)}
    for figure in figures:
        if figure.name not in held or not math.isclose(figure.value, held[figure.name], rel_tol=1e-4):
            yield figure


def seed_means(rows: Iterable[ResultRow], averaged: str) -> Iterator[Figure]:
    """Yield the mean over seeds of figures, with its standard error, under their names without `_seed<number>`.

    Args:
        rows: a results file; the last row of a name counts.
        averaged: a regular expression that such names without seed match as a whole.
    """
    by_name: dict[str, list[ResultRow]] = {}
    for row in {row.name: row for row in rows}.values():
        name, num_seeds = re.subn(r"_seed\d+", "", row.name)
        if num_seeds and re.fullmatch(averaged, name):
            by_name.setdefault(name, []).append(row)
    for name, of_seeds in by_name.items():
        yield from mean_figures(name, [row.value for row in of_seeds], of_seeds[0].unit, of_seeds[0].op)
