"""Kills commands at many moments, in several processes, each with a server and undamaged results of its own."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import track

# Name of the command or format, fault as for `QarlServer.run`, and where.
Case = tuple[str, str, int]


@dataclass(slots=True)
class Counts:
    """What a series of kills gave.

    Attributes:
        kills: commands that were killed before their end.
        identical: how many of them ended as a command that was not killed, run again.
        different: what the others left, one line each.
    """

    kills: int = 0
    identical: int = 0
    different: list[str] = field(default_factory=list)

    def note(self, kill: str, problem: str) -> None:
        """Count a kill, and what was other than without it, if anything was."""
        self.kills += 1
        self.identical += not problem
        if problem:
            self.different.append(f"{kill}: {problem}")

    def add(self, other: "Counts") -> None:
        """Add another series to this one."""
        self.kills += other.kills
        self.identical += other.identical
        self.different += other.different


class Killed(Protocol):
    """A command that can be killed again and again."""

    def kill(self, counts: Counts, *, fault: str, at: int) -> None:
        """Kill it, run it again and count.

        Args:
            counts: what is added to.
            fault: as for `QarlServer.run`.
            at: where.
        """


Make = Callable[[str, Path], Killed]
_made: dict[str, Killed] = {}
_make: Make
_folder: Path


def kill_each(cases: Iterable[Case], make: Make, jobs: int, title: str) -> Counts:
    """Meet every case.

    Args:
        cases: what is killed, and where.
        make: makes the command of a name in a folder that does not exist; importable from its module.
        jobs: processes.
        title: what the progress bar says.

    Returns:
        The counts of all.
    """
    cases, total = list(cases), Counts()
    with ProcessPoolExecutor(jobs, get_context("spawn"), _start, (make,)) as pool:
        found = pool.map(_kill, cases, chunksize=4)
        for counts in track(found, title, total=len(cases), console=Console(stderr=True)):
            total.add(counts)
    return total


def _start(make: Make) -> None:
    global _make, _folder
    _make, _folder = make, Path(tempfile.mkdtemp(prefix="qarl-kills-"))
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)


def _kill(case: Case) -> Counts:
    name, fault, at = case
    if name not in _made:
        _made[name] = _make(name, _folder / name)
    counts = Counts()
    _made[name].kill(counts, fault=fault, at=at)
    return counts
