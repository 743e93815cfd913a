"""How many more of the same problems an arm solves than another does, from the answers that runs keep."""

from collections.abc import Iterable

from rows import slug

from qarl_nemo.metrics.estimate import Estimate
from qarl_nemo.metrics.results import Figure
from qarl_nemo.metrics.runs import Run
from qarl_nemo.metrics.validations import paired, read_rewards, validation_files


def answer_differences(runs: Iterable[Run], prefix: str, over: str | None = None) -> list[Figure]:
    """Return mean_i (arm_i - other_i) of each arm and seed after its last step, over the first validation set.

    Without `over` an arm stands against the rollout-only arm of its seed that has its format; BF16 against all of its
    seed. Runs that kept no answers, or were cut before their last validation, have no figures.

    Args:
        runs: whole runs.
        prefix: begins the names, `real_<model>_<data>`.
        over: the arm that all others of its seed stand against.
    """
    all_runs = list(runs)
    figures = []
    for base in all_runs:
        for run in all_runs:
            if run.seed != base.seed or run is base or not _comparable(run, base, over):
                continue
            if found := _difference(run, base):
                name = f"{prefix}_{slug(run.arm)}_seed{run.seed}_ahead_of_{slug(base.arm)}"
                figures.append(Figure(name, found.value, "", ">="))
                if found.standard_error is not None:
                    figures.append(Figure(f"{name}_error", found.standard_error, "", "<="))
    return figures


def _comparable(run: Run, base: Run, over: str | None) -> bool:
    if over is not None:
        return base.arm == over
    served = run.setting("qarl.format") == base.setting("qarl.format")
    misaligned = base.setting("qarl.alignment") == "rollout_only" and "," not in base.arm
    return misaligned and (served or run.setting("qarl.alignment") == "none")


def _difference(run: Run, base: Run) -> Estimate | None:
    files = validation_files(run.path), validation_files(base.path)
    last = run.steps[-1]
    if not all(last in of_run for of_run in files):
        return None
    rewards = [read_rewards(of_run[last]) for of_run in files]
    first = next(iter(rewards[0]))[0]
    of_set = [{problem: reward for problem, reward in earned.items() if problem[0] == first} for earned in rewards]
    return paired(*of_set)
