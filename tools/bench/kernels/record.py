"""A measured figure of a kernel, printed and appended to the results."""

import sys
from collections.abc import Iterable
from pathlib import Path

from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures, running_command


def record(figures: Iterable[Figure], path: Path | None) -> None:
    """Print figures and append them to a results file with the command that is running.

    Args:
        figures: what was measured.
        path: docs/results/kernels.json; None only prints.

    Raises:
        ValueError: a row or the file is not valid; nothing is written.
    """
    command = running_command(f"python tools/bench/kernels/{Path(sys.argv[0]).name}", "--record")
    record_figures(path, figures, command=command, **facts("cuda", packages=["triton"]))
