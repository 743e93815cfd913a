"""A comparison as files and as tables."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from qarl_nemo.files import write_atomic
from qarl_nemo.measure.compare.operators import PHASES, total_by_operator
from qarl_nemo.measure.compare.run import Comparison
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.measure.kept import keep_others
from qarl_nemo.metrics.report.fidelity import write_fidelity_figure
from qarl_nemo.metrics.report.style import format_number

# The columns that fit a terminal of 80 characters; compare.json has all figures.
_COLUMNS = {
    "gap_mean": "|gap|",
    "gap_over_floor": "x floor",
    "gap_over_own": "x own",
    "gap_p99": "p99",
    "kl_k3": "k3 KL",
    "top1_agreement": "top-1",
}

# The arms that compare no learner with an engine.
_BESIDE = {
    "attention": "the learner against itself, with another attention kernel: the format's own floor",
    "engine": "the engine against itself, as it wrote its tokens and as it reads them",
}


def write_comparison(folder: Path, settings: CompareSettings, result: Comparison) -> tuple[Path, Path]:
    """Write `compare.json` and `compare.png`; those of other settings get a number and stay.

    Returns:
        Both files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keep_others(folder / "compare.json", dataclasses.asdict(settings), ".png")
    content = {
        "settings": dataclasses.asdict(settings),
        "engine": result.engine,
        "methods": result.methods,
        "rows": _finite(result.rows),
        "operators": _finite(result.operators),
    }
    write_atomic(folder / "compare.json", json.dumps(content, indent=1, default=str, allow_nan=False) + "\n")
    title = f"{settings.checkpoint.name}, learner to {result.engine}"
    return folder / "compare.json", write_fidelity_figure(result.rows, folder / "compare.png", title)


def _finite(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # JSON has no NaN or infinity.
    return json.loads(json.dumps(rows), parse_constant=lambda _: None)


def comparison_tables(result: Comparison) -> Iterator[Table]:
    """Yield a table for each decoding, with a line for each arm and format."""
    for decoding in dict.fromkeys(row["decoding"] for row in result.rows):
        table = Table(title=f"learner to {result.engine}, {decoding}, nats a token", box=None, padding=(0, 1, 0, 0))
        table.add_column("arm", no_wrap=True)
        for heading in _COLUMNS.values():
            table.add_column(heading, justify="right", no_wrap=True)
        for row in result.rows:
            if row["decoding"] == decoding:
                arm = row["arm"] if row["arm"] == row["format"] else f"{row['arm']} {row['format']}"
                table.add_row(arm, *(format_number(row[key]) for key in _COLUMNS))
        yield table


def legend(result: Comparison) -> Iterator[str]:
    """Yield what the columns and arms of the tables mean."""
    yield "|gap|, its p99 and k3 KL are in nats a token; top-1 is the share of tokens on which both agree."
    yield "x floor: |gap| over that of bf16, which has BF16 on both sides. x own: over |gap| of the arm `attention`."
    arms = {row["arm"] for row in result.rows}
    yield from (f"{arm}: {meaning}" for arm, meaning in _BESIDE.items() if arm in arms)


def operator_tables(result: Comparison) -> Iterator[Table]:
    """Yield a table for each format: which share of an operator's values is the engine's, how far others are."""
    for fmt in dict.fromkeys(row["format"] for row in result.operators):
        totals = total_by_operator([row for row in result.operators if row["format"] == fmt])
        table = Table("operator", title=f"{fmt}: the learner's on {result.engine}'s inputs", box=None, padding=(0, 1))
        for phase in PHASES:
            for heading in (f"{phase} same", "dB", "largest"):
                table.add_column(heading, justify="right", no_wrap=True)
        for operator in dict.fromkeys(row["operator"] for row in totals):
            cells = {row["phase"]: _cells(row) for row in totals if row["operator"] == operator}
            table.add_row(operator, *(cell for phase in PHASES for cell in cells.get(phase, ("", "", ""))))
        yield table


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    if row["snr_db"] is None:
        return "all", "", ""
    return f"{row['identical']:.4%}", f"{row['snr_db']:.1f}", format_number(row["max_abs"])
