"""`qarl report`."""

from pathlib import Path
from typing import Annotated

import typer

from qarl_nemo.cli.program import command


@command
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or log folders of NeMo-RL; several are compared.")
    ],
    output: Annotated[Path | None, typer.Option(help="HTML file; default <first run>/report.html.")] = None,
) -> None:
    """Write an HTML report: reward, KL, entropy, ratios by sign, bands, scatter, error tokens, timings."""
    from qarl_nemo.metrics.report import write_report

    path = write_report(runs, output or runs[0] / "report.html")
    typer.echo(f"report: {path}")
