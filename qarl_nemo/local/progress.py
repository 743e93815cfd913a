"""Live progress: a bar with reward, gap and ETA on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINES = 20


class LiveProgress:
    """Shows one phase of a run.

    Args:
        label: what is running.
        total: steps in all.
        done: steps already done, by an earlier part of a resumed run.
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        self.console = Console()
        self.label, self.total, self.first = label, total, done
        self.started = time.perf_counter()
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task(label, total=total, completed=done, status="")

    def update(self, step: int, **values: float) -> None:
        """Show that `step` is done, with the values to watch."""
        status = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.progress.update(self.task, completed=step, status=status)
        every = max(1, self.total // _LINES)
        if not self.console.is_terminal and (step % every == 0 or step == self.total):
            elapsed = time.perf_counter() - self.started
            eta = elapsed / max(1, step - self.first) * (self.total - step)
            self.console.print(f"{self.label} {step}/{self.total}  {status}  {elapsed:.0f} s, ETA {eta:.0f} s")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
