"""Diagnostics of NeMo-RL's steps: the embedded engine's files, in the log folder of each start.

A learner's rank only sees log-probabilities of the weights that are being trained inside the loss, so that is where
they are collected: by one rank, from its own responses, in a few steps of a run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl_nemo.files import FileError
from qarl_nemo.metrics.diagnostics import DiagnosticsCollector


@dataclass(slots=True)
class Recording:
    """What one step leaves behind.

    Attributes:
        folder: NeMo-RL's log folder of this start.
        collector: gathers the step's micro-batches.
    """

    folder: Path
    collector: DiagnosticsCollector

    def write(self) -> None:
        """Write the step's files; a folder that cannot be written costs a line, not the run."""
        try:
            self.collector.write(self.folder)
        except (OSError, FileError) as error:
            print(f"qarl: diagnostics are not written: {error}; every node needs logger.log_dir", flush=True)


@dataclass(slots=True)
class Recorder:
    """Says which steps are recorded: the first of a start, and every `period`-th.

    Attributes:
        folder: NeMo-RL's log folder of this start.
        period: steps between two recordings.
        step: the last step that was trained, before this start or in it.
        started: whether this start has trained a step.
    """

    folder: Path
    period: int
    step: int
    started: bool = False

    def begin_step(self) -> Recording | None:
        """Count a step, and return its recording if it has one."""
        self.step += 1
        due = not self.started or self.step % self.period == 0
        self.started = True
        return Recording(self.folder, DiagnosticsCollector(self.step)) if due else None


def completed_steps(state: Any, *, asynchronous: bool) -> int:
    """Return how many steps a run had finished when it started.

    Args:
        state: NeMo-RL's `GRPOSaveState`. Its asynchronous loop counts in `current_step` alone, which in the synchronous
            one begins anew in every epoch.
        asynchronous: which of the loops runs.
    """
    return state.current_step if asynchronous else state.total_steps
