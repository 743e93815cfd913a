"""What every program here takes, how it calls an arm, and its rows of several seeds."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from qarl_nemo.metrics.estimate import mean_of
from qarl_nemo.metrics.results import Figure


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
