"""Measured rollout speeds as a table, files and rows of docs/results."""

import dataclasses
import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from qarl_nemo.files import write_atomic
from qarl_nemo.measure.kept import keep_others
from qarl_nemo.measure.speed.advice import SpeedRow, recommend
from qarl_nemo.measure.speed.run import FormatSpeed
from qarl_nemo.measure.speed.settings import BASELINE, SpeedJob
from qarl_nemo.metrics.report.rollout_speed import write_rollout_speed_figure
from qarl_nemo.metrics.results import Figure, result_rows

# Columns after the format's name; a refusal takes the place of all numbers.
_COLUMNS = ("decode tokens/s", "noise", "x bf16", "prefill tokens/s", "weights GiB", "peak GiB", "KV cache tokens")


def speed_table(rows: Sequence[SpeedRow]) -> Table:
    """Return the terminal's table; every figure is the median of its repeats."""
    table = Table("batch", box=None, padding=(0, 1, 0, 0))
    table.add_column("format", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        if row.reason is None:
            table.add_row(str(row.batch_size), row.format_name, *_cells(row))
        else:
            table.add_row(str(row.batch_size), row.format_name, "[red]no[/]")
    return table


def notes(speeds: Sequence[FormatSpeed], rows: Sequence[SpeedRow]) -> list[str]:
    """Say why formats were not measured, and how evenly the measured tokens were spread over the experts.

    Args:
        speeds: what was measured.
        rows: what `speed_rows` returned.

    Returns:
        Lines, ready for rich.
    """
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.reason is not None:
            reasons.setdefault((row.format_name, row.reason), []).append(row.batch_size)
    lines = [
        f"{name} not measured at batch {', '.join(map(str, sizes))}: {reason}"
        for (name, reason), sizes in reasons.items()
    ]
    loads = [load for speed in speeds if (load := speed.engine.get("busiest_expert")) is not None]
    if loads:
        lines.append(f"load of the busiest expert under dummy routers: {max(loads):.2f}x the mean")
    return [escape(line) for line in lines]


def write_speed(folder: Path, job: SpeedJob, speeds: Sequence[FormatSpeed], rows: Sequence[SpeedRow]) -> list[Path]:
    """Write `rollout_speed.json`, and `rollout_speed.png` if anything was measured; others get a number and stay.

    Args:
        folder: an existing folder.
        job: what was asked for.
        speeds: what was measured.
        rows: what `speed_rows` returned.

    Returns:
        The files.
    """
    settings = dataclasses.asdict(job.settings)
    keep_others(folder / "rollout_speed.json", settings, ".png")
    content = {
        "settings": settings,
        "hardware": job.hardware,
        "vllm": job.vllm_version,
        "recommendation": recommend(rows),
        "rows": [dataclasses.asdict(row) for row in rows],
        "measured": [dataclasses.asdict(speed) for speed in speeds],
    }
    paths = [folder / "rollout_speed.json"]
    write_atomic(paths[0], json.dumps(content, indent=1, default=str) + "\n")
    if any(row.reason is None for row in rows):
        title = f"{job.settings.model.resolve().name}: vLLM {job.vllm_version} on {job.hardware}"
        shown = [dataclasses.asdict(row) for row in rows if row.reason is None]
        paths.append(write_rollout_speed_figure(shown, folder / "rollout_speed.png", title))
    return paths


def recorded_rows(job: SpeedJob, rows: Sequence[SpeedRow], command: str) -> list[dict[str, Any]]:
    """Return the figures as rows of docs/results.

    Args:
        job: what was asked for.
        rows: what `speed_rows` returned.
        command: the command that measures them again.

    Returns:
        Rows for `append_results`: speeds by format and batch size, memory by format, and the largest noise.
    """
    measured = [row for row in rows if row.reason is None]
    figures: list[Figure] = []
    for row in measured:
        place = f"{row.format_name}_b{row.batch_size}"
        figures.append(Figure(f"rollout_tokens_s_{place}", row.decode_tokens_s, "tokens/s", ">="))
        figures.append(Figure(f"rollout_prefill_tokens_s_{place}", row.prefill_tokens_s, "tokens/s", ">="))
        if row.speedup is not None and row.format_name != BASELINE:
            figures.append(Figure(f"rollout_speedup_{place}", row.speedup, "", ">="))
    for row in {row.format_name: row for row in measured}.values():
        figures.append(Figure(f"rollout_weights_gib_{row.format_name}", row.weights_gib, "GiB", "<="))
        figures.append(Figure(f"rollout_kv_cache_tokens_{row.format_name}", row.kv_cache_tokens, "tokens", ">="))
    if measured:
        noise = max(row.decode_noise / row.decode_tokens_s for row in measured)
        figures.append(Figure("rollout_noise_max", noise, "", "<="))
    return result_rows(
        figures,
        hardware=job.hardware,
        versions={"python": platform.python_version(), "torch": version("torch"), "vllm": job.vllm_version},
        command=command,
    )


def _cells(row: SpeedRow) -> list[str]:
    return [
        f"{row.decode_tokens_s:,.0f}",
        f"{100 * row.decode_noise / row.decode_tokens_s:.1f} %",
        "" if row.speedup is None else f"{row.speedup:.2f}",
        f"{row.prefill_tokens_s:,.0f}",
        f"{row.weights_gib:.1f}",
        "" if row.peak_gib is None else f"{row.peak_gib:.1f}",
        f"{row.kv_cache_tokens:,}",
    ]
