"""What quantized rollouts cost and what QaRL wins back, from the accuracies of paired seeds.

Arms are called BF16, `rollout-only FORMAT` and `QaRL FORMAT`; what follows a comma is another objective. A format's
recovery, (QaRL - rollout-only) / (BF16 - rollout-only) of the paired seeds' mean accuracies, is a row only where
rollout-only is behind BF16 by more than two standard errors of the paired difference.
"""

import re
from collections.abc import Mapping

import numpy as np

from qarl_formats import FORMAT_NAMES, NARROW_NAMES
from qarl_nemo.metrics.estimate import mean_of
from qarl_nemo.metrics.results import Figure

_BASELINE, _ROLLOUT_ONLY, _QARL = "bf16", "rollout_only_", "qarl_"
_STANDARD_ERRORS = 2.0


def recoveries(values: Mapping[str, float], prefix: str) -> list[Figure]:
    """Return what each format's rollouts cost and what QaRL won back, paired by seed, and the recovery if it can be."""
    name = re.compile(rf"{re.escape(prefix)}_(\w+)_seed(\d+)_test_accuracy")
    accuracy = {found.groups(): value for row, value in values.items() if (found := name.fullmatch(row))}
    figures = []
    for fmt in (*FORMAT_NAMES, *NARROW_NAMES):
        arms = (_BASELINE, _ROLLOUT_ONLY + fmt, _QARL + fmt)
        seeds = sorted({seed for _, seed in accuracy if all((arm, seed) in accuracy for arm in arms)}, key=int)
        if not seeds:
            continue
        bf16, rollout_only, qarl = (np.array([accuracy[arm, seed] for seed in seeds]) for arm in arms)
        lost, gained = bf16 - rollout_only, qarl - rollout_only
        print(f"{fmt}, seeds {seeds}: BF16 - rollout-only {lost.round(4)}, QaRL - rollout-only {gained.round(4)}")
        figures += paired(f"{prefix}_lost_{fmt}", lost) + paired(f"{prefix}_gained_{fmt}", gained)
        error = mean_of(lost.tolist()).standard_error
        if error is not None and lost.mean() > _STANDARD_ERRORS * error:
            figures.append(Figure(f"{prefix}_recovery_{fmt}", float(gained.mean() / lost.mean()), "", ">=", 0.8))
    return figures


def paired(name: str, differences: np.ndarray) -> list[Figure]:
    """Return the mean of one difference a seed, and its standard error where there are two seeds or more."""
    mean = mean_of(differences.tolist())
    return [
        Figure(f"{name}_mean", mean.value, "", ">="),
        *([] if mean.standard_error is None else [Figure(f"{name}_error", mean.standard_error, "", "<=")]),
    ]
