"""Event files of a run: metrics.jsonl, TensorBoard always, Weights & Biases when asked for.

metrics.jsonl holds one JSON object per step with flat keys, flushed per step. Resuming cuts away what was written after
the checkpoint, diagnostics and validations among it, so that a killed and resumed run holds the records of an
uninterrupted one, and none of a later step. JSON has no NaN or infinity: such values are written as null.
"""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from qarl_nemo.files import FileError, make_folder, os_reason, write_atomic
from qarl_nemo.installation import pip_command
from qarl_nemo.metrics.diagnostics import DIAGNOSTICS_DIR
from qarl_nemo.metrics.recorded import LARGEST, StepRecord, read_lines
from qarl_nemo.metrics.tensorboard_file import TensorboardFile
from qarl_nemo.metrics.validations import VALIDATION_DIR

METRICS_FILE = "metrics.jsonl"
_FILE_OF_STEP = re.compile(r"step_(\d+)\.(?:npz|jsonl)")


class EventWriter:
    """Writes one step's metrics to every sink of a run.

    Args:
        run_dir: the run's folder, created when missing.
        resume_step: last step the restored checkpoint contains, 0 without one; what later steps wrote is dropped.
        wandb_project: also log to this project of Weights & Biases, under an id kept in `run_dir/wandb_id` so that a
            resumed run continues.
        config: resolved config shown there.

    Raises:
        FileError: `run_dir` lacks a record up to `resume_step`.
        ImportError: W&B asked for and not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int = 0,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        wandb = None if wandb_project is None else _import_wandb()
        make_folder(run_dir, "a run's folder")
        path = run_dir / METRICS_FILE
        records = read_lines(path) if path.exists() else []
        require_steps(path, resume_step)
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in records[:resume_step]))
        _drop_files_after(run_dir, resume_step)
        self._last_step = resume_step
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = TensorboardFile(run_dir / "tensorboard", resume_step)
        self._wandb = None if wandb_project is None else _open_wandb(wandb, run_dir, wandb_project, config or {})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step to every sink and flush it.

        Args:
            step: training step, larger than the last one written.
            metrics: flat keys such as `reward/mean`; numbers or one-element tensors. Values that are not finite,
                or beyond float32's range, become null in JSON and are left out of TensorBoard and W&B.

        Raises:
            FileError: the disk is full or failed.
        """
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        self._last_step = step
        numbers = {name: _as_number(value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if abs(value) <= LARGEST}
        record = {"step": step} | {name: finite.get(name) for name in numbers}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            # If a checkpoint survives a power failure, the records of its steps must have survived, too.
            os.fsync(self._file.fileno())
            self._tensorboard.write(step, finite)
        except OSError as error:
            raise FileError(
                f"{self._file.name}: step {step} cannot be written: {os_reason(error)}; then the same command goes on"
            ) from error
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def close(self) -> None:
        """Close every sink."""
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The user should see the error that ended the run, not that files on the same full disk could not be closed.
        with contextlib.suppress(*(() if kind is None else (OSError,))):
            self.close()


def recorded_steps(path: Path) -> int:
    """Return how many training steps a metrics.jsonl holds, whose line n must be step n.

    Args:
        path: the file, which need not exist.

    Returns:
        The last step, 0 without records.

    Raises:
        FileError: a line is another step than its number, or no record.
    """
    # As strict as the report: better refuse now than when the finished run is reported.
    records = read_lines(path, StepRecord) if path.exists() else []
    for number, record in enumerate(records, start=1):
        if record.get("step") != number:
            raise FileError(
                f"{path}, line {number}: expected the record of step {number}, found step {record.get('step')!r}; "
                "restore the file, or start another run in another run_dir"
            )
    return len(records)


def require_steps(path: Path, step: int) -> None:
    """Require that a metrics.jsonl holds every step up to a checkpoint's.

    Args:
        path: the file.
        step: the checkpoint's.

    Raises:
        FileError: it holds fewer, or another one in between.
    """
    recorded = recorded_steps(path)
    if recorded < step:
        raise FileError(
            f"{path} ends with line {recorded}, but the checkpoint to resume from contains step {step}: lines "
            f"{recorded + 1} to {step} are missing; restore the file, or start another run in another run_dir"
        )


def _drop_files_after(run_dir: Path, step: int) -> None:
    for folder in (DIAGNOSTICS_DIR, VALIDATION_DIR):
        for path in sorted((run_dir / folder).glob("step_*")):
            name = _FILE_OF_STEP.fullmatch(path.name)
            if name and int(name[1]) > step:
                path.unlink()


def _as_number(value: float) -> float | int:
    return int(value) if isinstance(value, int) else float(value)


def missing_wandb() -> str:
    """Return what to do where the package of Weights & Biases is not installed."""
    return f"logging to W&B needs the package wandb: {pip_command('wandb')}"


def _import_wandb() -> Any:
    try:
        # optional and slow to import: only for those who ask for it
        import wandb
    except ImportError as error:
        raise ImportError(missing_wandb()) from error
    return wandb


def _open_wandb(wandb: Any, run_dir: Path, project: str, config: Mapping[str, Any]) -> Any:
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_atomic(id_file, uuid.uuid4().hex[:12])
    run_id = id_file.read_text(encoding="utf-8")
    return wandb.init(project=project, name=run_dir.name, dir=run_dir, id=run_id, resume="allow", config=dict(config))
