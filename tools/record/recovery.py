"""What quantized rollouts cost and what QaRL wins back, from the accuracies of paired seeds.

Arms are called BF16, `rollout-only FORMAT` and `QaRL FORMAT`; what follows a comma is another objective. Differences
are means over the seeds that have both arms:

    lost       BF16 - rollout-only
    gained     QaRL - rollout-only, alignment and TBPO together
    aligned    QaRL with GSPO - rollout-only, which has GSPO too: alignment alone

A format's recovery, gained / lost over the seeds with all three arms, is a row only where rollout-only is behind BF16
by more than two standard errors of the paired difference.
"""

import re
from collections.abc import Mapping

from rows import mean_figures

from qarl_formats import FORMAT_NAMES, NARROW_NAMES
from qarl_nemo.metrics.estimate import mean_of
from qarl_nemo.metrics.results import Figure

_BASELINE = "bf16"
_STANDARD_ERRORS = 2.0
_BySeed = dict[int, float]


def recoveries(values: Mapping[str, float], prefix: str) -> list[Figure]:
    """Return what each format's rollouts cost and what was won back, paired by seed, and the recovery if it can be."""
    name = re.compile(rf"{re.escape(prefix)}_(\w+)_seed(\d+)_test_accuracy")
    accuracy: dict[str, _BySeed] = {}
    for row, value in values.items():
        if found := name.fullmatch(row):
            accuracy.setdefault(found[1], {})[int(found[2])] = value
    figures = []
    for fmt in (*FORMAT_NAMES, *NARROW_NAMES):
        bf16, rollout_only, qarl, gspo = (
            accuracy.get(arm, {}) for arm in (_BASELINE, f"rollout_only_{fmt}", f"qarl_{fmt}", f"qarl_{fmt}_gspo")
        )
        differences = {
            "lost": _difference(bf16, rollout_only),
            "gained": _difference(qarl, rollout_only),
            "aligned": _difference(gspo, rollout_only),
        }
        for kind, by_seed in differences.items():
            figures += _paired(f"{prefix}_{kind}_{fmt}", by_seed)
        figures += _recovery(f"{prefix}_recovery_{fmt}", differences["lost"], differences["gained"])
    return figures


def _difference(arm: _BySeed, other: _BySeed) -> _BySeed:
    return {seed: arm[seed] - other[seed] for seed in sorted(arm.keys() & other.keys())}


def _paired(name: str, by_seed: _BySeed) -> list[Figure]:
    if not by_seed:
        return []
    print(f"{name}: {', '.join(f'seed {seed} {value:.4f}' for seed, value in by_seed.items())}")
    return mean_figures(name, by_seed.values())


def _recovery(name: str, lost: _BySeed, gained: _BySeed) -> list[Figure]:
    seeds = lost.keys() & gained.keys()
    cost = mean_of(lost[seed] for seed in seeds)
    if cost.standard_error is None or cost.value <= _STANDARD_ERRORS * cost.standard_error:
        return []
    return [Figure(name, mean_of(gained[seed] for seed in seeds).value / cost.value, "", ">=", 0.8)]
