"""A comparison's figures as rows of docs/results."""

import datetime
import math
import sys
from pathlib import Path
from typing import Any

from qarl_nemo.local.compare import FLOOR, Comparison
from qarl_nemo.local.compare_operators import total_by_operator
from qarl_nemo.local.compare_settings import CompareSettings
from qarl_nemo.local.setup import resolve_device
from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import append_results

MAX_GAP_RATIO = 1.05
# What RL trains on; greedy responses are in compare.json.
_DECODING = "sampled"


def append_comparison(path: Path, settings: CompareSettings, result: Comparison) -> None:
    """Append the figures to a results file, with the command that is running.

    Args:
        path: the file.
        settings: what was asked for.
        result: what was measured.

    Raises:
        ValueError: the file is not valid; nothing is written.
    """
    arguments = sys.argv[1:]
    at = arguments.index("--record")
    command = " ".join(["qarl", *arguments[:at], *arguments[at + 2 :]])
    append_results(path, result_rows(settings, result, resolve_device(settings.device).type, command))


def result_rows(settings: CompareSettings, result: Comparison, device: str, command: str) -> list[dict[str, Any]]:
    """Return the rows of a results file; names end in targets other than the experts alone, and in vLLM's attention.

    Args:
        settings: what was asked for.
        result: what was measured.
        device: `cpu` or `cuda`.
        command: what measures it again.

    Returns:
        `gap_floor_bf16`; for each format `gap_aligned_`, `gap_ratio_` and `gap_ratio_rollout_only_` over that floor;
        `gap_attention_`, the learner against itself with another attention kernel, and `gap_ratio_own_`, aligned over
        that; `gap_engine_`, the engine against itself; with operators `operator_<format>_<name>_<phase>_same` and
        `.._db`.
    """
    facts = {
        "hardware": hardware(device),
        "versions": versions() | dict([result.engine.split(" ")] if " " in result.engine else []),
        "command": command,
        "date": datetime.date.today().isoformat(),
    }
    suffix = "" if settings.targets == ("experts",) else "_" + "_".join(settings.targets)
    suffix += "_engine_attention" if settings.attention == "engine" else ""
    return [
        {"name": name + suffix, "value": float(f"{value:.5g}"), "unit": unit, "op": op, "goal": goal, **facts}
        for name, value, unit, op, goal in (*_gap_figures(result), *_operator_figures(result))
        # An engine that agrees with itself in every bit, as on a CPU, is nothing to divide by.
        if math.isfinite(value)
    ]


def _gap_figures(result: Comparison) -> list[tuple]:
    figures: list[tuple] = []
    for row in result.rows:
        arm, fmt = row["arm"], row["format"]
        if row["decoding"] != _DECODING:
            continue
        if arm != "rollout_only":
            figures.append((f"gap_{'floor' if arm == FLOOR else arm}_{fmt}", row["gap_mean"], "nats", "<=", None))
        if arm == "aligned":
            figures.append((f"gap_ratio_{fmt}", row["gap_over_floor"], "", "<=", MAX_GAP_RATIO))
            figures.append((f"gap_ratio_own_{fmt}", row["gap_over_own"], "", "<=", None))
        elif arm == "rollout_only":
            figures.append((f"gap_ratio_{arm}_{fmt}", row["gap_over_floor"], "", "<=", None))
    return figures


def _operator_figures(result: Comparison) -> list[tuple]:
    figures: list[tuple] = []
    for fmt in dict.fromkeys(row["format"] for row in result.operators):
        for row in total_by_operator([row for row in result.operators if row["format"] == fmt]):
            name = f"operator_{fmt}_{row['operator']}_{row['phase']}"
            figures.append((f"{name}_same", row["identical"], "fraction", ">=", None))
            if row["snr_db"] is not None:
                figures.append((f"{name}_db", row["snr_db"], "dB", ">=", None))
    return figures
