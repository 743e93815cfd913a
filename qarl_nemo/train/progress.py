"""Live progress: a bar with phase, reward, gap and ETA on a terminal, occasional lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINES = 20
# Without a terminal, a phase is announced only if no line was printed for this long.
_QUIET_S = 60.0
# Work that took less is not worth a line of its own.
_LONG_S = 5.0


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show what is being done ("loading the model"), on a terminal until it is done, and how long it took if long."""
    console, started = Console(markup=False), time.perf_counter()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(what)
        yield
    seconds = time.perf_counter() - started
    if seconds >= _LONG_S:
        console.print(f"{what} took {seconds:.0f} s")


class LiveProgress:
    """Shows one phase of a run.

    Args:
        label: what is running.
        total: steps in all.
        done: steps already done, by an earlier part of a resumed run.
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        # Names of runs may hold brackets.
        self.console = Console(markup=False)
        self.label, self.total, self.first = label, total, done
        self.started = self.printed = time.perf_counter()
        self.step = done
        self.progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task(label, total=total, completed=done, status="", phase="")

    def phase(self, name: str) -> None:
        """Show what the next step is doing."""
        self.progress.update(self.task, phase=name)
        now = time.perf_counter()
        if not self.console.is_terminal and now - self.printed > _QUIET_S:
            self.printed = now
            self.console.print(f"{self.label} step {self.step + 1}/{self.total}: {name}  {now - self.started:.0f} s")

    def update(self, step: int, **values: float) -> None:
        """Show that `step` is done, with the values to watch."""
        every = max(1, self.total // _LINES)
        is_due = step // every > self.step // every or step == self.total
        self.step = step
        status = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.progress.update(self.task, completed=step, status=status)
        if not self.console.is_terminal and is_due:
            self.printed = time.perf_counter()
            elapsed = self.printed - self.started
            eta = elapsed / max(1, step - self.first) * (self.total - step)
            self.console.print(f"{self.label} {step}/{self.total}  {status}  {elapsed:.0f} s, ETA {eta:.0f} s")

    def ended(self, why: str) -> None:
        """Say why no more steps follow, where some are left."""
        if self.step < self.total:
            self.console.print(f"{self.label} ends at {self.step}/{self.total}: {why}")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()
