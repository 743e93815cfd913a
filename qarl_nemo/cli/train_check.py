"""What `qarl train --check` says: what would run, or all that keeps it from starting here."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

if TYPE_CHECKING:
    from qarl_nemo.train.config import LocalConfig
    from qarl_nemo.train.preflight import Prepared


class _Start(NamedTuple):
    """Where a run would begin: after the step of a checkpoint, at its first step, or not at all."""

    step: int | None = None
    complete: bool = False

    def __str__(self) -> str:
        if self.complete:
            return "already complete"
        return "new" if self.step is None else f"resumed from step {self.step}"


def check_runs(runs: Sequence["LocalConfig"]) -> None:
    """Show the banner of the first run that has something left to do, and a line for each arm of a comparison.

    Args:
        runs: one run, or the runs of a comparison.

    Raises:
        ValueError: machine, model, data, disk or folders keep any of them from starting; every problem is listed.
    """
    from qarl_nemo.train.banner import show_banner
    from qarl_nemo.train.preflight import check

    found: dict[str, list[str]] = {}
    starts: dict[str, Counter[_Start]] = {}
    banner: tuple[LocalConfig, Prepared, int | None] | None = None
    examined = set()
    for run in runs:
        arm, problems = run.run.arm or run.name, list[str]()
        start = _look_into_folder(run, problems)
        starts.setdefault(arm, Counter())[start] += 1
        # Of what is checked, seeds change the folder alone.
        if not start.complete and arm not in examined:
            prepared, others = check(run)
            problems += others
            examined.add(arm)
            if banner is None and prepared is not None:
                banner = (run, prepared, start.step)
        for problem in dict.fromkeys(problems):
            found.setdefault(problem, []).append(arm)
    if found:
        of_some = {problem: f"{'; '.join(of)}: " for problem, of in found.items() if len(of) < len(starts)}
        lines = [of_some.get(problem, "") + problem for problem in found]
        raise ValueError("\n  ".join([f"{len(found)} problem(s), nothing was started:", *lines]))
    if banner:
        show_banner(*banner)
    typer.echo(_summary(runs, starts))


def _look_into_folder(run: "LocalConfig", problems: list[str]) -> _Start:
    from qarl_nemo.config.problems import attempt
    from qarl_nemo.files import require_free
    from qarl_nemo.train.run import LOCK_FILE
    from qarl_nemo.train.run_dir import inspect_run_dir, is_complete

    if attempt(problems, is_complete, run):
        return _Start(complete=True)
    step = attempt(problems, inspect_run_dir, run)
    attempt(problems, require_free, run.run_dir / LOCK_FILE, f"run folder {run.run_dir}")
    return _Start(step)


def _summary(runs: Sequence["LocalConfig"], starts: dict[str, Counter[_Start]]) -> str:
    if runs[0].run.arm is None:
        ((name, (start,)),) = starts.items()
        nothing = f", nothing is left to do in {runs[0].run_dir}"
        return f"checked, nothing was started: {name}, {start}{nothing * start.complete}"
    settings = {run.run.arm: run for run in runs}
    width = max(map(len, starts))
    lines = [f"{arm:<{width}}  {_told(settings[arm])}: {_counted(counts)}" for arm, counts in starts.items()]
    seeds = len({run.seed for run in runs})
    product = f"{_several(len(starts), 'arm')} x {_several(seeds, 'seed')} = {_several(len(runs), 'run')}"
    return "\n".join([*lines, f"checked, nothing was started: {product}"])


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _told(run: "LocalConfig") -> str:
    qarl = run.qarl
    return f"{qarl.format}, {qarl.alignment}, {run.loss_fn.objective}, {run.grpo.max_num_steps} steps"


def _counted(counts: Counter[_Start]) -> str:
    return ", ".join(f"{count} {start}" for start, count in counts.items())
