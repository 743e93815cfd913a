"""The report's tables as plain rows: headline, arms and seeds, differing settings, modules."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qarl_nemo.config import flatten
from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.style import format_duration, format_number
from qarl_nemo.metrics.runs import Run
from qarl_nemo.metrics.summary import smoothing_window, summarize_run

_MAX_SHAPES = 3


def headline(run: Run) -> list[dict[str, str]]:
    """Build the cards at the top of one run's page: label, value, note."""
    summary = summarize_run(run)
    window = smoothing_window(len(run.steps))
    first, final = format_number(summary["reward_first"]), format_number(summary["reward_final"])
    times = f"{format_number(summary['reward_ratio'])} x the first" if summary["reward_ratio"] > 0 else ""
    cards = [
        ("Arm", run.arm, f"seed {run.seed}" if run.seed is not None else ""),
        ("Format", _text(run.setting("qarl.format")), _group_size(run)),
        ("Alignment", _text(run.setting("qarl.alignment")), ""),
        ("Objective", _text(run.setting("loss_fn.objective")), ""),
        ("Reward", f"{first} to {final}", f"{times}, mean of {window} steps" if times else f"mean of {window} steps"),
        ("Mean |gap|", format_number(summary["abs_gap_mean"]), "nats per token"),
        ("Error tokens", _percent(summary["error_token_rate"]), f"last {window} steps"),
        ("Total time", format_duration(summary["time_s"]), f"{summary['num_steps']:.0f} steps"),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in cards]


def arm_rows(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """Build one row per arm: means over its seeds, ranges of the final reward."""
    rows = []
    for arm in arms:
        summaries = [summarize_run(run) for run in arm.runs]
        finals = [summary["reward_final"] for summary in summaries if math.isfinite(summary["reward_final"])]
        spread = f"{format_number(min(finals))} to {format_number(max(finals))}" if len(finals) > 1 else ""
        rows.append(
            {
                "name": arm.name,
                "color": arm.color,
                "num_runs": str(len(arm.runs)),
                "reward_first": format_number(_mean(summaries, "reward_first")),
                "reward_final": format_number(_mean(summaries, "reward_final")),
                "spread": spread,
                "abs_gap_mean": format_number(_mean(summaries, "abs_gap_mean")),
                "error_token_rate": _percent(_mean(summaries, "error_token_rate")),
                "time": format_duration(_mean(summaries, "time_s")),
            }
        )
    return rows


def seed_table(arms: Sequence[Arm]) -> dict[str, Any]:
    """Build the table of final rewards: `seeds` are its columns, `rows` hold name, color and one cell per seed."""
    seeds = sorted({run.seed for arm in arms for run in arm.runs}, key=lambda seed: (seed is None, seed))
    rows = []
    for arm in arms:
        finals = {run.seed: format_number(summarize_run(run)["reward_final"]) for run in arm.runs}
        rows.append({"name": arm.name, "color": arm.color, "cells": [finals.get(seed, "") for seed in seeds]})
    return {"seeds": [_text(seed) for seed in seeds], "rows": rows}


def config_differences(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """List the settings in which the first runs of arms differ, but seed, folder and labels: `key`, a value per arm."""
    flat = [flatten(arm.runs[0].config) for arm in arms]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    return [
        {"key": key, "values": [_text(settings.get(key)) for settings in flat]}
        for key in keys
        if key not in ("seed", "run_dir")
        and not key.startswith("run.")
        and len({str(settings.get(key)) for settings in flat}) > 1
    ]


def module_tables(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Build one table per arm that recorded its modules, name, note and groups, from its first run that did."""
    recorded = [(arm, next((run for run in arm.runs if run.quantized), None)) for arm in arms]
    return [
        {"name": arm.name, "color": arm.color, "note": _rollouts_alone(run), "groups": module_groups(run.quantized)}
        for arm, run in recorded
        if run is not None
    ]


def module_groups(quantized: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group modules that were treated alike: quantized, kind, format, reason, count, shapes and names."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in quantized:
        key = bool(row["quantized"]), row["kind"], row.get("format") or "", row.get("reason") or ""
        groups.setdefault(key, []).append(row)
    ordered = sorted(groups.items(), key=lambda item: not item[0][0])
    return [
        {
            "quantized": key[0],
            "kind": key[1],
            "format": key[2],
            "reason": key[3],
            "count": len(rows),
            "shapes": _shapes(rows),
            "names": [row["name"] for row in rows],
        }
        for key, rows in ordered
    ]


def _mean(summaries: Sequence[Mapping[str, float]], key: str) -> float:
    values = [summary[key] for summary in summaries if math.isfinite(summary[key])]
    return sum(values) / len(values) if values else math.nan


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _percent(fraction: float) -> str:
    return f"{format_number(100 * fraction)} %" if math.isfinite(fraction) else "-"


def _group_size(run: Run) -> str:
    size = run.setting("qarl.group_size")
    return f"groups of {size}" if size else ""


def _rollouts_alone(run: Run) -> str:
    """Say in which format rollouts are served, where the learner's modules do not."""
    if run.setting("qarl.alignment") != "rollout_only":
        return ""
    targets = ", ".join(run.setting("qarl.targets") or [])
    return f"Rollouts alone are in {run.setting('qarl.format')}{targets and f': {targets}'}."


def _shapes(rows: Sequence[Mapping[str, Any]]) -> str:
    written = [row["shape"] for row in rows]
    shapes = list(dict.fromkeys(shape if isinstance(shape, str) else " x ".join(map(str, shape)) for shape in written))
    return ", ".join(shapes[:_MAX_SHAPES]) + (", ..." if len(shapes) > _MAX_SHAPES else "")
