"""The standing campaign: damaged inputs, kills, refit faults, Muon's step; the rows of docs/results/trust.json.

    make campaign                     # everything, recorded
    make campaign-short               # a sample without kills, in CI

Every part is seeded. A failure prints what reproduces it.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import Figure, append_results, result_rows

SHORT_INPUTS, SHORT_KILLS = 120, 3


def damaged_inputs(options: argparse.Namespace) -> list[Figure]:
    """Give the four commands damaged inputs."""
    from damage import count_failures

    tried, failures = count_failures(options.inputs, options.seed, options.jobs)
    counts = Counter(failure.outcome for failure in failures)
    return [
        Figure("mutated_inputs", tried, "", ">=", 10_000),
        Figure("mutated_tracebacks", counts["traceback"], "", "<=", 0),
        Figure("mutated_hangs", counts["hang"], "", "<=", 0),
        Figure("mutated_wrong_accepted", counts["wrongly accepted"] + counts["left behind"], "", "<=", 0),
    ]


def kills(options: argparse.Namespace) -> list[Figure]:
    """Kill conversions and runs, and let them go on."""
    import conversion_kills
    import train_kills

    every_call = options.kills > SHORT_KILLS
    formats = list(train_kills.FORMATS) if every_call else list(train_kills.FORMATS)[:1]
    counts = conversion_kills.run(options.kills, options.seed, options.jobs, every_call=every_call)
    counts.add(train_kills.run(options.kills, options.seed, formats, options.jobs, every_call=every_call))
    print(f"{counts.identical} of {counts.kills} killed commands ended identically", *counts.different, sep="\n    ")
    return [
        Figure("kills", counts.kills, "", ">=", 150),
        Figure("kills_identical", counts.identical / max(1, counts.kills), "fraction", ">=", 1),
    ]


def refit(options: argparse.Namespace) -> list[Figure]:
    """Refit with every fault."""
    import refit_faults

    counts = refit_faults.run(seed=options.seed, short=options.short)
    tried, survived = counts["faults"] + counts["aba_rounds"], counts["survived"] + counts["aba_identical"]
    print(f"{survived} of {tried} refit faults and rounds A -> B -> A survived", *counts["failures"], sep="\n    ")
    return [
        Figure("refit_faults", tried, "", ">=", 500),
        Figure("refit_faults_survived", survived / max(1, tried), "fraction", ">=", 1),
    ]


def muon(_: argparse.Namespace) -> list[Figure]:
    """Compare the recipes' Muon with the embedded engine's."""
    import muon_rms

    return [Figure("muon_rms_ratio", muon_rms.measure(), "", "<=", 1.01)]


PARTS: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
    "inputs": damaged_inputs,
    "kills": kills,
    "refit": refit,
    "muon": muon,
}


def main() -> int:
    """Run the parts asked for; returns 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--short", action="store_true", help="a sample: counts are not held against their goals")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50, help="at random moments of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", type=Path, help="file of docs/results")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; legal: {', '.join(PARTS)}")
    if options.short:
        options.inputs, options.kills = SHORT_INPUTS, SHORT_KILLS
    figures = [figure for name in options.parts or PARTS for figure in PARTS[name](options)]
    missed = [figure for figure in figures if not _met(figure, short=options.short)]
    for figure in figures:
        print(f"{figure.name}: {figure.value:g} (goal {figure.op} {figure.goal:g}){'  MISSED' * (figure in missed)}")
    if options.record:
        command = "make campaign" if options.seed == 0 else f"make campaign SEED={options.seed}"
        rows = result_rows(figures, hardware=hardware("cpu"), versions=versions(), command=command)
        append_results(options.record, rows)
    return int(bool(missed))


def _met(figure: Figure, *, short: bool) -> bool:
    at_least = figure.op == ">="
    counted = at_least and figure.goal > 1
    return (short and counted) or (figure.value >= figure.goal if at_least else figure.value <= figure.goal)


if __name__ == "__main__":
    sys.exit(main())
