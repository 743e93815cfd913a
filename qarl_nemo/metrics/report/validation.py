"""Arms against each other on the problems of their newest common validation."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_nemo.metrics.estimate import Estimate, mean_of
from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.validations import Problem, paired, read_rewards, validation_files

_STANDARD_ERRORS = 2.0
Rewards = Mapping[Problem, float]


def validation_tables(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Build one table a data set: each arm's reward, and its difference from the arms above it, paired by problem.

    Where some seeds are common to all arms, those alone count.

    Returns:
        Tables with dataset, step, seeds, columns and rows; none where fewer than two arms kept their answers.
    """
    files = {arm.name: _by_seed(arm) for arm in arms}
    kept = [arm for arm in arms if files[arm.name]]
    if len(kept) < 2:
        return []
    seeds = set.intersection(*(set(files[arm.name]) for arm in kept))
    chosen = {
        arm.name: [found for seed, found in files[arm.name].items() if seed in seeds or not seeds] for arm in kept
    }
    steps = set.intersection(*(set(found) for of_arm in chosen.values() for found in of_arm))
    if not steps:
        return []
    step = max(steps)
    rewards = {name: _mean([read_rewards(found[step]) for found in of_arm]) for name, of_arm in chosen.items()}
    datasets = dict.fromkeys(dataset for earned in rewards.values() for dataset, _ in earned)
    return [_table(dataset, kept, rewards) | {"step": step, "seeds": len(seeds)} for dataset in datasets]


def _by_seed(arm: Arm) -> dict[int | None, dict[int, Path]]:
    found = {run.seed: validation_files(run.path) for run in arm.runs}
    return {seed: files for seed, files in found.items() if files}


def _mean(of_seeds: Sequence[Rewards]) -> Rewards:
    shared = [problem for problem in of_seeds[0] if all(problem in earned for earned in of_seeds)]
    return {problem: sum(earned[problem] for earned in of_seeds) / len(of_seeds) for problem in shared}


def _table(dataset: str, arms: Sequence[Arm], rewards: Mapping[str, Rewards]) -> dict[str, Any]:
    of_set = {
        arm.name: {problem: reward for problem, reward in rewards[arm.name].items() if problem[0] == dataset}
        for arm in arms
    }
    rows = []
    for place, arm in enumerate(arms):
        earned = of_set[arm.name]
        differences = [paired(earned, of_set[other.name]) for other in arms[:place]]
        cells = [{"text": _text(one, "+"), "bold": _apart(one)} for one in differences]
        cells += [{"text": "", "bold": False}] * (len(arms) - 1 - place)
        mean = _text(mean_of(earned.values()))
        row = {"name": arm.name, "color": arm.color, "num_problems": len(earned), "reward": mean}
        rows.append(row | {"cells": cells})
    return {"dataset": dataset, "columns": [arm.name for arm in arms[:-1]], "rows": rows}


def _apart(difference: Estimate) -> bool:
    error = difference.standard_error
    return error is not None and abs(difference.value) > _STANDARD_ERRORS * error


def _text(one: Estimate, sign: str = "") -> str:
    if math.isnan(one.value):
        return "-"
    error = "" if one.standard_error is None else f" ± {100 * one.standard_error:.1f}"
    return f"{100 * one.value:{sign}.1f}{error}"
