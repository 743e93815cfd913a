"""`qarl report`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from qarl_nemo.cli.program import command


@command
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, folders of comparisons, or log folders of NeMo-RL; several are compared."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="HTML file; default FOLDER/report.html, for several ./comparison.html.")
    ] = None,
) -> None:
    """Draw a run, or several side by side, on one HTML page: reward, gap, ratios, error tokens, timings."""
    from qarl_nemo.metrics.report import write_report

    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output {output}: the report is a page of HTML; name a file that ends in .html")
    # A comparison must not replace the first run's own report.
    place = output or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    if output is None and not os.access(place.parent, os.W_OK) and place.parent.is_dir():
        raise ValueError(f"{place} cannot be written: permission denied; --output FILE.html writes it elsewhere")
    path = write_report(runs, place)
    typer.echo(f"report: {path}")
