"""The report's table of noise stages: what each strength of exploration did to reward, entropy and gap."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qarl_nemo.metrics.report.arms import Arm
from qarl_nemo.metrics.report.style import format_number
from qarl_nemo.metrics.summary import finite_mean

_MEANS = ("noise/sigma", "reward/mean", "loss/entropy", "rollout/entropy_estimate", "mismatch/abs_gap_mean")


def stage_rows(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Build one row for each stage of each arm that has noise: name, color and cells.

    Returns:
        Cells are stage, sigma, steps, reward, the learner's and the sampler's entropy, and gap; means over the stage's
        steps and the arm's runs.
    """
    rows = []
    for arm in arms:
        stages = np.concatenate([run.column("noise/stage") for run in arm.runs])
        steps = np.concatenate([run.steps for run in arm.runs])
        columns = {key: np.concatenate([run.column(key) for run in arm.runs]) for key in _MEANS}
        for stage in np.unique(stages[np.isfinite(stages)]):
            here = stages == stage
            sigma, *means = (format_number(finite_mean(column[here])) for column in columns.values())
            span = f"{steps[here].min():.0f} to {steps[here].max():.0f}"
            rows.append({"name": arm.name, "color": arm.color, "cells": [f"{stage:.0f}", sigma, span, *means]})
    return rows
