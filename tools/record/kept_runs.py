"""Runs as docs/results/runs keeps them: only the curves that figures are drawn from, a few kilobytes a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from qarl_nemo.config import write_yaml
from qarl_nemo.files import make_folder, write_atomic
from qarl_nemo.metrics.events import METRICS_FILE
from qarl_nemo.metrics.runs import CONFIG_FILE, Run

_SCORE = "validation/reward"
_COLUMNS = (
    "reward/mean",
    "mismatch/abs_gap_mean",
    "mismatch/kl_k3",
    "optim/grad_norm",
    "loss/kept_fraction",
    "loss/entropy",
    "error_tokens/rate",
    "response_length_tokens/mean",
    "loss/kl_k3",
    "refit/grid_bits",
    "refit/flipped_codes",
)
_SETTINGS = ("seed", "run.name", "run.arm", "qarl.alignment", "qarl.format", "loss_fn.objective")


def keep_runs(runs: list[Run], folder: Path) -> None:
    """Write what is kept of each run, in place of an earlier one of its arm and seed.

    What is kept of a run already stays if only its first steps are given now, which are counted beside shorter runs.

    Args:
        runs: the runs.
        folder: gets a run directory for each, which `qarl report` reads as any other.
    """
    for run in runs:
        kept_run = folder / run.path.name
        make_folder(kept_run, "a kept run")
        # What the first set scored stands for the run's own data, so that runs with and without others can be compared.
        columns = {name: name for name in _COLUMNS} | {_SCORE: next(iter(run.score_columns().values()))}
        lines = [json.dumps({"step": int(step)} | _values(run, row, columns)) for row, step in enumerate(run.steps)]
        curves = "\n".join(lines) + "\n"
        file = kept_run / METRICS_FILE
        if file.is_file() and file.read_text(encoding="utf-8").startswith(curves):
            continue
        config: dict[str, Any] = {}
        for dotted in _SETTINGS:
            block, _, key = dotted.rpartition(".")
            (config.setdefault(block, {}) if block else config)[key] = run.setting(dotted)
        write_yaml(kept_run / CONFIG_FILE, config)
        # Last, because a folder with curves counts as a kept run.
        write_atomic(file, curves)


def kept(folder: Path) -> list[Path]:
    """Return the run directories that are kept in a folder."""
    return [path.parent for path in sorted(folder.glob(f"*/{METRICS_FILE}"))]


def _values(run: Run, row: int, columns: dict[str, str]) -> dict[str, float]:
    found = {name: float(run.column(column)[row]) for name, column in columns.items()}
    return {name: float(f"{value:.5g}") for name, value in found.items() if np.isfinite(value)}
