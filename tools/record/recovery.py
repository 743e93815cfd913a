r"""What quantized rollouts cost and what QaRL wins back, from the accuracies of paired seeds.

Arms are called BF16, `rollout-only FORMAT` and `QaRL FORMAT`; what follows a comma is another objective. Differences
are means over the seeds that have both arms:

    lost       BF16 - rollout-only
    gained     QaRL - rollout-only, alignment and TBPO together
    aligned    QaRL with GSPO - rollout-only, which has GSPO too: alignment alone

A format's recovery is r = mean(gained) / mean(lost) over the n seeds with all three arms. Its error is that of a ratio
by the delta method, over the seeds alone:

    error = stdev_i(gained_i - r lost_i) / (sqrt(n) mean(lost)),  n - 1 degrees of freedom

in which the covariance that gained and lost have from rollout-only, part of both, cancels seed by seed. Both are rows
only where rollout-only is behind BF16: mean(lost) is more than t errors, t being Student's 97.5 % point of n - 1
degrees of freedom. Its error is that over the seeds, but no less than what the problems alone make of it. Rows that
fewer seeds had allowed are removed where more no longer do.

`real_model_runs.py` records these rows with its runs. Run by itself, this computes them again from recorded
accuracies and adds what the file lacks, with the machine and the day of the newest accuracy behind it:

    python tools/record/recovery.py --model qwen2.5-coder-0.5b --data gsm8k
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import mean_figures, new_figures, parser_of

from qarl_formats import FORMAT_NAMES, NARROW_NAMES
from qarl_nemo.metrics.estimate import mean_of
from qarl_nemo.metrics.results import (
    Figure,
    ResultRow,
    append_results,
    read_results,
    remove_results,
    result_rows,
)

_BASELINE = "bf16"
# Student's 97.5 % points of 1 to 9 degrees of freedom: chance alone exceeds each in 2.5 % of cases. Two errors, which
# many draws need, it exceeds in 15 % with two seeds and in 9 % with three. More seeds take the last, which is safe.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
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
        paired = re.compile(rf"{re.escape(prefix)}_{_BASELINE}_seed\d+_ahead_of_rollout_only_{fmt}_error")
        over_problems = [value for row, value in values.items() if paired.fullmatch(row)]
        lost, gained = differences["lost"], differences["gained"]
        figures += _recovery(f"{prefix}_recovery_{fmt}", lost, gained, over_problems)
    return figures


def _difference(arm: _BySeed, other: _BySeed) -> _BySeed:
    return {seed: arm[seed] - other[seed] for seed in sorted(arm.keys() & other.keys())}


def _paired(name: str, by_seed: _BySeed) -> list[Figure]:
    if not by_seed:
        return []
    print(f"{name}: {', '.join(f'seed {seed} {value:.4f}' for seed, value in by_seed.items())}")
    return mean_figures(name, by_seed.values())


def _recovery(name: str, lost: _BySeed, gained: _BySeed, over_problems: Sequence[float]) -> list[Figure]:
    seeds = sorted(lost.keys() & gained.keys())
    cost = mean_of(lost[seed] for seed in seeds)
    if cost.standard_error is None:
        return []
    # Two seeds can give nearly the same difference by chance, and their error is then next to nothing. What the
    # problems make of each is recorded where answers were kept; a seed without them counts as the others do.
    mean_square = statistics.fmean(error**2 for error in over_problems) if over_problems else 0.0
    least = math.sqrt(mean_square / len(seeds))
    bound = _STUDENT_T[min(len(seeds) - 1, len(_STUDENT_T)) - 1] * max(cost.standard_error, least)
    if cost.value <= bound:
        print(f"{name}: not given, {len(seeds)} seeds lost {cost.value:.4f}, which is to be more than {bound:.4f}")
        return []
    ratio = mean_of(gained[seed] for seed in seeds).value / cost.value
    rest = statistics.stdev(gained[seed] - ratio * lost[seed] for seed in seeds) / math.sqrt(len(seeds))
    return [Figure(name, ratio, "", ">=", 0.8), Figure(f"{name}_error", rest / cost.value, "", "<=")]


def remove_withdrawn(path: Path, figures: Iterable[Figure], prefix: str) -> None:
    """Remove the rows of recoveries that the accuracies in a file no longer allow, and say so.

    Args:
        path: a results file.
        figures: what `recoveries` makes of all of it.
        prefix: begins their names.
    """
    given = {figure.name for figure in figures}
    computed = [fmt for fmt in (*FORMAT_NAMES, *NARROW_NAMES) if f"{prefix}_lost_{fmt}_mean" in given]
    names = {f"{prefix}_recovery_{fmt}{kind}" for fmt in computed for kind in ("", "_error")} - given
    for row in remove_results(path, names):
        print(f"{row.name}: removed, it was {row.value:g} on {row.date}")


def dated_rows(rows: Iterable[ResultRow], figures: Iterable[Figure], prefix: str) -> list[dict[str, Any]]:
    """Return figures of `recoveries` as rows with the machine and the day of the newest accuracy of a format.

    Args:
        rows: a results file.
        figures: some of what `recoveries` makes of it.
        prefix: begins their names.
    """
    by_date = sorted(rows, key=lambda row: row.date)
    found = []
    for figure in figures:
        fmt = re.sub(rf"{re.escape(prefix)}_[a-z]+_|_(mean|error)$", "", figure.name)
        arms = rf"({_BASELINE}|rollout_only_{fmt}|qarl_{fmt}|qarl_{fmt}_gspo)"
        accuracy = re.compile(rf"{re.escape(prefix)}_{arms}_seed\d+_test_accuracy")
        *_, newest = (row for row in by_date if accuracy.fullmatch(row.name))
        facts = {"hardware": newest.hardware, "versions": newest.versions, "command": newest.command}
        found += [row | {"date": newest.date} for row in result_rows([figure], **facts)]
    return found


def main() -> None:
    """Compute the rows again from recorded accuracies, append those that are new or changed, print them."""
    parser = parser_of(__doc__, "real_model")
    parser.add_argument("--model", required=True, help="as the rows are named, e.g. qwen2.5-coder-0.5b")
    parser.add_argument("--data", required=True, help="as the rows are named, e.g. gsm8k")
    arguments = parser.parse_args()
    recorded, prefix = read_results(arguments.record), f"real_{arguments.model}_{arguments.data}"
    computed = recoveries({row.name: row.value for row in recorded}, prefix)
    remove_withdrawn(arguments.record, computed, prefix)
    new = dated_rows(recorded, new_figures(arguments.record, computed), prefix)
    for row in new:
        print(f"{row['name']:70} {row['value']:>10g}")
    append_results(arguments.record, new)


if __name__ == "__main__":
    main()
