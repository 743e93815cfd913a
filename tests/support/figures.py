"""Figures that tests measure, kept as rows of docs/results where somebody asks for it."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from qarl_nemo.metrics.results import Figure, append_results, result_rows


def keep(
    figures: Iterable[Figure], *, variable: str, results: str, test: str, hardware: str, versions: Mapping[str, str]
) -> None:
    """Append figures to the file that an environment variable names, if it names one.

    Args:
        figures: what was measured.
        variable: the environment variable.
        results: the file's name in docs/results, for the rows' command.
        test: pytest's arguments, for the rows' command.
        hardware: what they were measured on.
        versions: package versions that matter.
    """
    if path := os.environ.get(variable):
        command = f"{variable}=docs/results/{results}.json python -m pytest {test}"
        append_results(Path(path), result_rows(figures, hardware=hardware, versions=versions, command=command))
