"""Run directories as the report reads them: whole, cut short by a kill, or only just begun."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from qarl_nemo.config import plain, read_yaml
from qarl_nemo.metrics import nemo_rl_logs
from qarl_nemo.metrics.diagnostics import StepDiagnostics, diagnostic_steps, read_diagnostics
from qarl_nemo.metrics.events import METRICS_FILE
from qarl_nemo.metrics.recorded import (
    ARM_FILE,
    Module,
    NemoConfig,
    RunConfig,
    StepRecord,
    read_lines,
    read_rows,
    require_kind,
)

CONFIG_FILE = "config.yaml"
QUANTIZED_FILE = "quantized.json"
_EXAMPLE_STEPS = 5
_SCORE = "validation/reward"
_ALIGNMENT_NAMES = {"aligned": "aligned", "rollout_only": "rollout only", "none": "BF16"}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Run:
    """One run directory, read.

    Attributes:
        path: the directory.
        name: `run.name` of its config, else the directory's name.
        arm: what is compared: `run.arm`, else alignment, format and objective. Runs of one arm differ by seed.
        config: resolved config, empty when missing.
        steps: [S] training steps recorded.
        columns: key of metrics.jsonl -> [S], NaN where a step has no such value; and `band_share/<place>_<sign>`,
            the share of one advantage sign's responses (or tokens) that lie in_band, below_band or above_band.
        diagnostics: newest readable step, None when there is none.
        examples: example rollouts of the newest steps, newest first, each with its `step`.
        quantized: rows of quantized.json.
        missing: sentences saying what a complete run would have and this one lacks.
    """

    path: Path
    name: str
    arm: str
    config: dict[str, Any]
    steps: Floats
    columns: dict[str, Floats]
    diagnostics: StepDiagnostics | None
    examples: list[dict[str, Any]]
    quantized: list[dict[str, Any]]
    missing: tuple[str, ...]

    @property
    def seed(self) -> int | None:
        """Seed of the config."""
        return self.config.get("seed")

    def column(self, key: str) -> Floats:
        """Return [S] values of one metric, all NaN when it was never written."""
        return self.columns.get(key, np.full(len(self.steps), np.nan))

    def score_columns(self) -> dict[str, str]:
        """Return the column with each validation set's mean reward by the set's name, in the run's order.

        Returns:
            One column a set, whose name is empty if it is the only one; what several sets score together is left out.
        """
        prefix = f"{_SCORE}_"
        named = {column.removeprefix(prefix): column for column in self.columns if column.startswith(prefix)}
        return named or {"": _SCORE}

    def setting(self, dotted: str) -> Any:
        """Look up `a.b` in the config, None when absent."""
        value: Any = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def load_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Read run directories, in the order given; runs of the same name go by their directory's.

    Args:
        run_dirs: run directories; the folder of a comparison stands for the runs in it.

    Raises:
        ValueError: directories that are not runs, all of them named with what was looked for; one is named more than
            once; or broken files.
    """
    if not run_dirs:
        raise ValueError("no run directories given")
    run_dirs = [run for path in run_dirs for run in _compared_in(path) or [path]]
    _require_each_once(run_dirs)
    problems = [problem for problem in map(_why_not_a_run, run_dirs) if problem]
    if problems:
        raise ValueError("not a run directory:\n  " + "\n  ".join(problems))
    runs = [load_run(path) for path in run_dirs]
    for label in (lambda run: run.path.resolve().name, lambda run: str(run.path)):
        counts = Counter(run.name for run in runs)
        runs = [replace(run, name=label(run)) if counts[run.name] > 1 else run for run in runs]
    return runs


def load_run(path: Path) -> Run:
    """Read one run directory; whatever a killed run did not get to write is listed in `missing`.

    Args:
        path: directory with at least config.yaml or metrics.jsonl, or a log folder of NeMo-RL.

    Raises:
        ValueError: a file is broken, other than by an unfinished last line.
    """
    if nemo_rl_logs.is_nemo_rl_log(path):
        return _load_nemo_rl(path)
    missing = []
    config: dict[str, Any] = {}
    if (path / CONFIG_FILE).exists():
        config = _read_config(path / CONFIG_FILE, RunConfig)
    else:
        missing.append(f"{CONFIG_FILE}: no arm, seed, band lines or resolved config")
    records = read_lines(path / METRICS_FILE, StepRecord) if (path / METRICS_FILE).exists() else []
    if not records:
        missing.append(f"{METRICS_FILE}: no training step has finished yet, so there are no curves")
    diagnostics, examples = _read_diagnostics(path, missing)
    quantized = read_rows(path / QUANTIZED_FILE, Module) if (path / QUANTIZED_FILE).exists() else []
    if not quantized:
        missing.append(f"{QUANTIZED_FILE}: no table of quantized modules")
    run_block = config.get("run") or {}
    name = run_block.get("name") or path.resolve().name
    return Run(
        path=path,
        name=name,
        arm=run_block.get("arm") or _describe_arm(config) or name,
        config=config,
        steps=np.array([record["step"] for record in records], float),
        columns=_add_band_shares(_columns(records)),
        diagnostics=diagnostics,
        examples=examples,
        quantized=quantized,
        missing=tuple(missing),
    )


def _load_nemo_rl(path: Path) -> Run:
    file = nemo_rl_logs.find_config(path)
    missing = (
        [] if file else [f"{CONFIG_FILE}: not started by examples/run_qarl_grpo.py, so no arm, seed or band lines"]
    )
    config = nemo_rl_logs.report_config(_read_config(file, NemoConfig) if file else {})
    records = nemo_rl_logs.read_records(path, config)
    if not records:
        missing.append("tensorboard/: no scalars; set logger.tensorboard_enabled=true")
    diagnostics = nemo_rl_logs.read_newest_diagnostics(path)
    if diagnostics is None:
        missing.append("train_data_step*.jsonl: none written yet, so there are no histograms, scatters or examples")
    name = path.resolve().name
    if name.startswith("exp_"):
        name = f"{path.resolve().parent.name}/{name}"
    return Run(
        path=path,
        name=name,
        arm=_describe_arm(config) or name,
        config=config,
        steps=np.array([record["step"] for record in records], float),
        columns=_add_band_shares(_columns(records)),
        diagnostics=diagnostics,
        examples=list(diagnostics.examples) if diagnostics else [],
        quantized=[],
        missing=tuple(missing),
    )


def _read_config(file: Path, kind: type[BaseModel]) -> dict[str, Any]:
    config = plain(read_yaml(file))
    require_kind(config, kind, str(file))
    return config


def _require_each_once(run_dirs: Sequence[Path]) -> None:
    spellings: dict[Path, list[str]] = {}
    for path in run_dirs:
        spellings.setdefault(path.resolve(), []).append(str(path))
    twice = [f"{names[0]} (as {', '.join(names)})" for names in spellings.values() if len(names) > 1]
    if twice:
        # Drawn twice, one run would look like two repetitions that agree.
        raise ValueError(f"named more than once: {'; '.join(twice)}; name each run once")


def _compared_in(path: Path) -> list[Path]:
    """Return the runs in a comparison's folder; none of any other, in which runs need not belong together."""
    if not path.is_dir() or _why_not_a_run(path) is None:
        return []
    return [child for child in _runs_in(path) if (child / ARM_FILE).is_file()]


def _why_not_a_run(path: Path) -> str | None:
    if path.is_file():
        return f"{path}: is a file; name the folder of its run"
    if not path.is_dir():
        return f"{path}: no such directory (looked for {CONFIG_FILE} or {METRICS_FILE} in it)"
    if any((path / name).exists() for name in (CONFIG_FILE, METRICS_FILE)) or nemo_rl_logs.is_nemo_rl_log(path):
        return None
    inner = _runs_in(path)
    found = f"; these folders in it are runs: {', '.join(map(str, inner))}" if inner else ""
    return f"{path}: has neither {CONFIG_FILE} nor {METRICS_FILE}, nor NeMo-RL's tensorboard/{found}"


def _runs_in(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir() and _why_not_a_run(child) is None)


def _describe_arm(config: dict[str, Any]) -> str:
    qarl, loss = config.get("qarl") or {}, config.get("loss_fn") or {}
    alignment = qarl.get("alignment")
    parts = [_ALIGNMENT_NAMES.get(alignment, alignment), None if alignment == "none" else qarl.get("format")]
    return " ".join(str(part) for part in [*parts, loss.get("objective")] if part)


def _columns(records: list[dict[str, Any]]) -> dict[str, Floats]:
    keys = {key: None for record in records for key in record if key != "step"}
    return {key: np.array([record.get(key) for record in records], dtype=float) for key in keys}


def _add_band_shares(columns: dict[str, Floats]) -> dict[str, Floats]:
    shares = {}
    for sign in ("positive", "negative"):
        of_sign = columns.get(f"loss/fraction_{sign}")
        for place in ("in_band", "below_band", "above_band"):
            part = columns.get(f"loss/{place}_fraction_{sign}")
            if part is not None and of_sign is not None:
                shares[f"band_share/{place}_{sign}"] = np.where(of_sign > 0, part, np.nan) / of_sign
    return columns | shares


def _read_diagnostics(path: Path, missing: list[str]) -> tuple[StepDiagnostics | None, list[dict[str, Any]]]:
    steps = diagnostic_steps(path)
    if not steps:
        missing.append("diagnostics/: none written yet, so there are no histograms, scatters or examples")
        return None, []
    newest = [read_diagnostics(path, step) for step in steps[: -_EXAMPLE_STEPS - 1 : -1]]
    return newest[0], [example | {"step": item.step} for item in newest for example in item.examples]
