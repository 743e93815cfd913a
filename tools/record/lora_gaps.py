"""How far adapters are from their rollouts, over how far training all weights in the same format is.

A run's gap is divided by the first of these that there is:

    a run of all weights in the same folder, of the same format and seed
    PREFIX_bf16_seed<seed>_gap or PREFIX_qarl_<format>_seed<seed>_gap     such a run, recorded earlier
    gap_aligned_<format>_<targets>                                        `qarl compare`: the model before training

Which row it was stands behind the row's command, as a comment.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations

from rows import slug

from qarl_nemo.metrics.results import Figure
from qarl_nemo.metrics.runs import Run
from qarl_nemo.metrics.summary import summarize_run

# An adapter run's gap over the plain format's.
GOAL = 1.5


def gap_ratios(
    runs: Iterable[Run], recorded: Mapping[str, float], prefix: str | None = None
) -> Iterator[tuple[Figure, str | None]]:
    """Yield each adapter run's gap over the plain format's.

    Args:
        runs: whole runs of a folder, those of all weights among them.
        recorded: rows of real_model.json.
        prefix: begins the rows of runs of all weights, `real_<model>_<data>`; None = only runs of the folder count.

    Yields:
        The ratio, and the name of the row it was divided by, None for a run of the folder; nothing without either.
    """
    all_runs = list(runs)
    plain = {_setting(run): _gap(run) for run in all_runs if not run.setting("policy.lora")}
    for run in all_runs:
        if not run.setting("policy.lora"):
            continue
        gap, row = plain.get(_setting(run)), None
        if gap is None and prefix is not None:
            row = next((name for name in _rows(run, prefix) if name in recorded), None)
            gap = recorded[row] if row else None
        if gap is not None:
            yield Figure(f"lora_gap_ratio_{arm_of(run)}", _gap(run) / gap, "", "<=", GOAL), row


def arm_of(run: Run) -> str:
    """Return what names of a run's rows end in."""
    return f"{slug(run.arm).removeprefix('lora_')}_seed{run.seed}"


def _rows(run: Run, prefix: str) -> tuple[str, ...]:
    fmt = run.setting("qarl.format")
    arm = "bf16" if run.setting("qarl.alignment") == "none" else f"qarl_{fmt}"
    # A comparison names its targets in the order of its command.
    orders = permutations(run.setting("qarl.targets") or ())
    return f"{prefix}_{arm}_seed{run.seed}_gap", *(f"gap_aligned_{fmt}_{'_'.join(order)}" for order in orders)


def _gap(run: Run) -> float:
    return summarize_run(run)["abs_gap_mean"]


def _setting(run: Run) -> tuple[object, ...]:
    return (*(run.setting(f"qarl.{key}") for key in ("alignment", "format", "group_size")), run.seed)
