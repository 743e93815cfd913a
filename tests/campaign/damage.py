"""Gives `quantize`, `convert`, `train` and `report` thousands of damaged inputs and counts what must never happen.

    PYTHONPATH=tests/campaign:tests python tests/campaign/damage.py --inputs 10000 --seed 0 --jobs 2

Counted are: tracebacks (anything but one message that this project wrote on purpose, and every end by a signal), hangs
(longer than the limit), wrong acceptances (exit code 0 where the oracle of the command says otherwise, see
`checkpoint_commands` and `run_commands`), and what is left behind by a refusal. Case N of a command depends on the
seed, the command and N alone; `--case quantize:123` runs one again and shows how it ended.
"""

import argparse
import atexit
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from checkpoint_commands import Convert, Quantize
from commands import Command, Run
from edits import Edit
from kill_points import LATE, QarlServer
from rich.console import Console
from rich.progress import track
from run_commands import Report, TrainAnew, TrainOn

COMMANDS: tuple[type[Command], ...] = (Quantize, Convert, TrainAnew, TrainOn, Report)
OUTCOMES = ("traceback", "hang", "wrongly accepted", "left behind")
# On a busy machine; a case takes a fraction of a second, a report two.
LIMIT_S = 180
_MEMORY_BYTES = 12 << 30
_UNEXPECTED = ("Traceback (most recent call last)", "QARL_DEBUG=1 shows", "Fatal Python error", "Segmentation fault")


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that failed, shrunk.

    Attributes:
        case: `command:number`.
        outcome: one of `OUTCOMES`.
        edits: what is needed for it.
        detail: why, or the end of the output.
    """

    case: str
    outcome: str
    edits: tuple[str, ...]
    detail: str


class _Call(Run):
    """Runs `qarl` in a fork of a warm process; relative paths are relative to the folder."""

    def __init__(self, server: QarlServer) -> None:
        self._server = server

    def __call__(self, arguments: Sequence[str], folder: Path) -> tuple[int, str]:
        """Return exit code and output."""
        ended = self._server.run(arguments, watch=folder, timeout_s=LIMIT_S, folder=folder)
        return ended.code, ended.output


class Worker:
    """Runs cases of one command in a folder of its own."""

    def __init__(self, command: Command, seed: int, scratch: Path) -> None:
        """Start a warm process.

        Args:
            command: with its inputs written.
            seed: the campaign's seed.
            scratch: for the cases; made and removed.
        """
        self._command, self._seed, self._folder = command, seed, scratch / "case"
        self._stack = contextlib.ExitStack()
        self.run = _Call(self._stack.enter_context(QarlServer(command.preload)))

    def close(self) -> None:
        """Stop the process."""
        self._stack.close()

    def edits(self, number: int) -> list[Edit]:
        """Return the damage of a case."""
        return self._command.draw(random.Random(f"{self._seed} {self._command.name} {number}"))

    def try_edits(self, edits: Sequence[Edit]) -> tuple[str, str] | None:
        """Run one case.

        Args:
            edits: its damage.

        Returns:
            Outcome and detail, None if all is well.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._command.base, self._folder, symlinks=True)
        for edit in edits:
            edit.apply(self._folder)
        extra = [text for edit in edits for text in edit.arguments]
        code, output = self.run([*self._command.arguments(self._folder), *extra], self._folder)
        if code == LATE:
            return None if self._command.works_on(self._folder) else ("hang", output[-400:])
        if code not in (0, 2) or any(mark in output for mark in _UNEXPECTED):
            return "traceback", f"exit code {code}: {output[-600:]}"
        if code == 0:
            try:
                reason = self._command.wrongly_accepted(self._folder, edits)
            except Exception as error:  # noqa: BLE001 an oracle that cannot read what was accepted says no
                reason = f"the oracle cannot read it: {type(error).__name__}: {error}"
            return ("wrongly accepted", reason) if reason else None
        reason = self._command.left_behind(self._folder, self.run)
        return ("left behind", f"{reason}; the refusal said: {output[-300:]}") if reason else None

    def case(self, number: int) -> Failure | None:
        """Run one case; a failure is shrunk to the fewest edits that still end so.

        Args:
            number: the case's number.

        Returns:
            The failure, None if all is well.
        """
        edits = self.edits(number)
        found = self.try_edits(edits)
        if found is None:
            return None
        for edit in edits if len(edits) > 1 else ():
            alone = self.try_edits([edit])
            if alone is not None and alone[0] == found[0]:
                edits, found = [edit], alone
                break
        return Failure(f"{self._command.name}:{number}", found[0], tuple(map(str, edits)), found[1])


def count_failures(inputs: int, seed: int, jobs: int, only: Sequence[str] = ()) -> tuple[int, list[Failure]]:
    """Run cases of every command.

    Args:
        inputs: how many, all commands together.
        seed: the campaign's seed.
        jobs: processes.
        only: names of commands; all if empty.

    Returns:
        How many inputs were tried, and the failures, which are printed as they are found.
    """
    _bound_memory()
    failures: list[Failure] = []
    tried = 0
    with tempfile.TemporaryDirectory(prefix="qarl-campaign-") as scratch:
        for kind in COMMANDS:
            if only and kind.name not in only:
                continue
            command, started = prepare(kind, Path(scratch)), time.monotonic()
            number = max(1, round(inputs * kind.share / sum(k.share for k in COMMANDS if not only or k.name in only)))
            found = []
            with ProcessPoolExecutor(
                jobs, mp_context=get_context("spawn"), initializer=_start, initargs=(command, seed, Path(scratch))
            ) as pool:
                cases = pool.map(_case, range(number), chunksize=8)
                for failure in track(cases, command.name, total=number, console=Console(stderr=True)):
                    if failure is not None:
                        found.append(failure)
                        _show(failure, seed)
            failures += found
            tried += number
            counts = Counter(failure.outcome for failure in found)
            print(
                f"{command.name}: {number} inputs, {time.monotonic() - started:.0f} s, {dict(counts) or 'no failure'}"
            )
            sys.stdout.flush()
    return tried, failures


def prepare(kind: type[Command], scratch: Path) -> Command:
    """Write a command's undamaged inputs and run them.

    Args:
        kind: the command.
        scratch: an existing folder.

    Returns:
        The command.
    """
    base = scratch / kind.name.replace(" ", "_")
    command = kind(base)
    if not kind.name.startswith(("train", "report")):
        base.mkdir()
    command.prepare()
    with QarlServer((*command.preload, *(("qarl_nemo.train.trainer",) if kind is Report else ()))) as server:
        command.learn(_Call(server))
    return command


_worker: Worker


def _start(command: Command, seed: int, scratch: Path) -> None:
    global _worker
    folder = scratch / f"worker{os.getpid()}"
    folder.mkdir()
    _worker = Worker(command, seed, folder)
    atexit.register(_worker.close)


def _case(number: int) -> Failure | None:
    return _worker.case(number)


def _bound_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _show(failure: Failure, seed: int) -> None:
    print(f"{failure.outcome}: --seed {seed} --case {failure.case!r}")
    for edit in failure.edits:
        print(f"    {edit[:300]}")
    print("    " + failure.detail.strip().replace("\n", "\n    ")[-700:])


def _one_case(case: str, seed: int) -> int:
    name, _, number = case.partition(":")
    kind = next(kind for kind in COMMANDS if kind.name == name)
    _bound_memory()
    with tempfile.TemporaryDirectory(prefix="qarl-campaign-") as scratch:
        worker = Worker(prepare(kind, Path(scratch)), seed, Path(scratch))
        try:
            edits = worker.edits(int(number))
            print("\n".join(map(str, edits)))
            found = worker.try_edits(edits)
        finally:
            worker.close()
    print("no failure" if found is None else f"{found[0]}: {found[1]}")
    return int(found is not None)


def main() -> int:
    """Run the campaign, or one case; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", default=(), help="names of commands")
    parser.add_argument("--case", help="run one case again, e.g. quantize:123")
    options = parser.parse_args()
    if options.case:
        return _one_case(options.case, options.seed)
    tried, failures = count_failures(options.inputs, options.seed, options.jobs, options.only)
    counts = Counter(failure.outcome for failure in failures)
    print(f"{tried} inputs: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
