"""A measured figure of a kernel, printed and appended to the results."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

from qarl_nemo.metrics.machine import hardware
from qarl_nemo.metrics.results import Figure, record_figures


def record(figures: Iterable[Figure], path: Path | None) -> None:
    """Print figures and append them to a results file with the command that is running.

    Args:
        figures: what was measured.
        path: docs/results/kernels.json; None only prints.

    Raises:
        ValueError: a row or the file is not valid; nothing is written.
    """
    packages = {"torch": torch.__version__, "triton": triton.__version__}
    record_figures(path, figures, hardware=hardware("cuda"), versions=packages, command=_command())


def _command() -> str:
    arguments = sys.argv[1:]
    if "--record" in arguments:
        at = arguments.index("--record")
        del arguments[at : at + 2]
    return " ".join(["python", f"tools/bench/kernels/{Path(sys.argv[0]).name}", *arguments])
