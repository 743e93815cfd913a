"""A measured figure of a kernel, printed and appended to the results."""

import datetime
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from qarl_nemo.metrics.results import append_results


class Figure(NamedTuple):
    """One figure; `op` and `goal` say what it should be."""

    name: str
    value: float
    unit: str
    op: str
    goal: float | None = None


def record(figures: Iterable[Figure], path: Path | None) -> None:
    """Print figures and append them to a results file with the command that is running.

    Args:
        figures: what was measured.
        path: docs/results/kernels.json; None only prints.

    Raises:
        ValueError: a row or the file is not valid; nothing is written.
    """
    facts = {
        "hardware": f"1x {torch.cuda.get_device_name()}",
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "command": _command(),
        "date": datetime.date.today().isoformat(),
    }
    rows = [{**figure._asdict(), **facts} for figure in figures]
    for row in rows:
        goal = "" if row["goal"] is None else f"  ({row['op']} {row['goal']:g})"
        print(f"{row['name']:55} {row['value']:10.4g} {row['unit']}{goal}", flush=True)
    if path is not None:
        append_results(path, rows)


def _command() -> str:
    arguments = sys.argv[1:]
    if "--record" in arguments:
        at = arguments.index("--record")
        del arguments[at : at + 2]
    return " ".join(["python", f"kernels/benchmarks/{Path(sys.argv[0]).name}", *arguments])
