"""A comparison as files and as a table."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from qarl_nemo.local.compare import Comparison
from qarl_nemo.local.compare_settings import CompareSettings
from qarl_nemo.metrics.atomic import write_atomic
from qarl_nemo.metrics.report.fidelity import write_fidelity_figure
from qarl_nemo.metrics.report.style import format_number

# What fits a terminal of 80 columns; compare.json has all.
_COLUMNS = {
    "gap_mean": "|gap|",
    "gap_over_floor": "x floor",
    "gap_p99": "p99",
    "kl_k3": "k3 KL",
    "ratio_p01": "ratio p01",
    "ratio_p99": "p99",
    "top1_agreement": "top-1",
}


def write_comparison(folder: Path, settings: CompareSettings, result: Comparison) -> tuple[Path, Path]:
    """Write `compare.json` and `compare.png`.

    Args:
        folder: created where it is missing.
        settings: what was asked for.
        result: what was measured.

    Returns:
        Both paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": dataclasses.asdict(settings),
        "engine": result.engine,
        "methods": result.methods,
        "rows": _without_nan(result.rows),
    }
    write_atomic(folder / "compare.json", json.dumps(content, indent=1, default=str, allow_nan=False) + "\n")
    title = f"{settings.checkpoint.name}, learner to {result.engine}"
    return folder / "compare.json", write_fidelity_figure(result.rows, folder / "compare.png", title)


def comparison_tables(result: Comparison) -> Iterator[Table]:
    """Yield the terminal's tables, one for each decoding; gaps and KL are in nats per token.

    Args:
        result: what was measured.

    Yields:
        One line for each arm and format.
    """
    for decoding in dict.fromkeys(row["decoding"] for row in result.rows):
        table = Table("arm", title=f"learner to {result.engine}, {decoding}", box=None, padding=(0, 1, 0, 0))
        for heading in _COLUMNS.values():
            table.add_column(heading, justify="right", no_wrap=True)
        for row in result.rows:
            if row["decoding"] == decoding:
                arm = row["arm"] if row["arm"] == row["format"] else f"{row['arm']} {row['format']}"
                table.add_row(arm, *(format_number(row[key]) for key in _COLUMNS))
        yield table


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
