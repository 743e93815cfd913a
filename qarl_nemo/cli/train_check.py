"""What `qarl train --check` says: what would run, or all that keeps it from starting here."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from qarl_nemo.train.config import LocalConfig


def check_runs(runs: Sequence["LocalConfig"]) -> None:
    """Show the banner of the first run that has something left to do, and a line for each arm of a comparison.

    Args:
        runs: one run, or the runs of a comparison.

    Raises:
        ValueError: machine, model, data, disk or folders keep any of them from starting; every problem is listed.
    """
    from qarl_nemo.config.problems import attempt
    from qarl_nemo.train.banner import show_banner
    from qarl_nemo.train.preflight import check
    from qarl_nemo.train.run_dir import inspect_run_dir, is_complete

    found: dict[str, list[str]] = {}
    states: dict[str, Counter[str]] = {}
    banner, examined = None, set()
    for run in runs:
        arm, problems = run.run.arm or run.run.name, list[str]()
        state = states.setdefault(arm, Counter())
        if attempt(problems, is_complete, run):
            state["already complete"] += 1
            continue
        step = attempt(problems, inspect_run_dir, run)
        state["new" if step is None else f"resumed from step {step}"] += 1
        # Of what is checked, seeds change the folder alone.
        if arm not in examined:
            prepared, others = check(run)
            banner, problems = banner or (run, prepared, step), problems + others
            examined.add(arm)
        for problem in dict.fromkeys(problems):
            found.setdefault(problem, []).append(arm)
    if found:
        of_some = {problem: f"{'; '.join(of)}: " for problem, of in found.items() if len(of) < len(states)}
        lines = [of_some.get(problem, "") + problem for problem in found]
        raise ValueError("\n  ".join([f"{len(found)} problem(s), nothing was started:", *lines]))
    if banner and banner[1]:
        show_banner(banner[0], banner[1], banner[2])
    typer.echo(_summary(runs, states))


def _summary(runs: Sequence["LocalConfig"], states: dict[str, Counter[str]]) -> str:
    if runs[0].run.arm is None:
        ((name, state),) = states.items()
        nothing = f", nothing is left to do in {runs[0].run_dir}"
        return f"checked, nothing was started: {name}, {next(iter(state))}{nothing * (not _left(state))}"
    settings = {run.run.arm: run for run in runs}
    width = max(map(len, states))
    lines = [f"{arm:<{width}}  {_told(settings[arm])}: {_counted(state)}" for arm, state in states.items()]
    seeds = len({run.seed for run in runs})
    product = f"{_several(len(states), 'arm')} x {_several(seeds, 'seed')} = {_several(len(runs), 'run')}"
    return "\n".join([*lines, f"checked, nothing was started: {product}"])


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _left(state: Counter[str]) -> bool:
    return any(word != "already complete" for word in state)


def _told(run: "LocalConfig") -> str:
    qarl = run.qarl
    return f"{qarl.format}, {qarl.alignment}, {run.loss_fn.objective}, {run.grpo.max_num_steps} steps"


def _counted(state: Counter[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in state.items())
