"""The code of a run's reward functions, as checksums in its folder: a run that goes on with another says so."""

import json
from pathlib import Path

from rich.console import Console

from qarl_nemo.data.reward_function import RewardFunction
from qarl_nemo.files import FileError, read_json, write_atomic
from qarl_nemo.train.tasks import TaskSource

_NAME = "rewards.json"


def hold_rewards(run_dir: Path, source: TaskSource, step: int | None) -> None:
    """Note the checksum of each reward function's code with the step, and tell on stderr which ones have changed.

    They are not refused, since nobody can tell a mended comment from another reward. A run of an earlier version, which
    noted none, notes them from now on.

    Args:
        run_dir: the run's folder.
        source: its problems.
        step: the checkpoint to go on from; None for a new run.

    Raises:
        FileError: what was noted cannot be read.
    """
    file = run_dir / _NAME
    found = _checksums(source)
    if not found:
        # One that an earlier, failed start left is no longer true.
        if step is None:
            file.unlink(missing_ok=True)
        return
    what = "the checksums of reward functions by step"
    noted = read_json(file, what) if step is not None and file.exists() else {}
    if damaged := [path for path, by_step in noted.items() if not isinstance(by_step, dict)]:
        raise FileError(f"{file}: expected {what}, but {', '.join(damaged)} has none; remove the file to go on")
    for path, checksum in found.items():
        # In the order in which they were noted.
        by_step = noted.setdefault(path, {})
        if by_step and list(by_step.values())[-1] == checksum:
            continue
        if by_step:
            Console(stderr=True, markup=False).print(
                f"reward function {path} changed since step {step} of this run: the steps after it get their rewards "
                f"from the new code; {file} holds the checksums of both",
                soft_wrap=True,
            )
        by_step.pop(str(step or 0), None)
        by_step[str(step or 0)] = checksum
    write_atomic(file, json.dumps(noted, indent=1) + "\n")


def _checksums(source: TaskSource) -> dict[str, str]:
    judges = (task.reward_function for tasks in source.tasks.values() for task in tasks)
    return {one.path: one.code_sha256 for one in judges if isinstance(one, RewardFunction) and one.code_sha256}
