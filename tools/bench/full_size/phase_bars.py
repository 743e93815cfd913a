"""Draw where the time of whole steps goes, a bar an arm, from rows of docs/results/full_size.json.

python tools/bench/full_size/phase_bars.py docs/results/full_size.json docs/images/full_size.png --workload a24

With several workloads each arm has a bar in each of them, so that the same work a GPU on more of them stands together.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from phase_memory import ORDER
from workloads import WORKLOADS

from qarl_nemo.files import os_reason
from qarl_nemo.metrics.report.style import INK, OTHER_COLOR, PHASE_COLORS, new_figure, report_style
from qarl_nemo.metrics.results import read_results

# What is computed for its own sake, by the name that readers know; every other phase only moves from one to the next.
_COMPUTED = {"rollout": "rollouts", "prev_logprobs": "log-probabilities", "update": "update", "refit": "refit, wake"}
_NAMES = {
    "nemo_rl_best": "NeMo-RL, BF16",
    "nemo_rl": "NeMo-RL, BF16, published recipe",
    "bf16": "qarl_nemo, BF16",
    "w4a16_linear": "qarl_nemo, w4a16, both kernels",
    "w4a16_beside": "qarl_nemo, w4a16, slower host",
    "w4a16_answers": "qarl_nemo, w4a16, one host",
    "w4a16_larger": "qarl_nemo, w4a16, larger micro-batches",
    "w4a16_separate_1_3": "qarl_nemo, w4a16, 1 + 3 GPUs",
    "nemo_rl_best_beside": "NeMo-RL, BF16, slower host",
    "nemo_rl_best_newest": "NeMo-RL, BF16, best settings",
    "w4a16_growing": "qarl_nemo, w4a16, memory that grows",
    "w4a16_asynchronous_1_3": "qarl_nemo, w4a16, 1 + 3 GPUs at once",
}


def phase_bars(values: Mapping[str, float], workload: str) -> dict[str, dict[str, float]]:
    """Return seconds of each phase and of the rest: arm -> phase -> s, the longest step first.

    Args:
        values: name of a row -> value.
        workload: `a24` for rows called `full_step_s_<arm>_a24`.
    """
    prefix, suffix = "full_step_s_", f"_{workload}"
    steps = {
        name.removeprefix(prefix).removesuffix(suffix): value
        for name, value in values.items()
        if name.startswith(prefix) and _workload(name) == workload
    }
    bars = {}
    for arm in sorted(steps, key=lambda arm: -steps[arm]):
        named = {phase: f"full_phase_s_{phase}_{arm}{suffix}" for phase in ORDER if phase in _COMPUTED}
        # Where each batch has one update, `record.py` has no row of log-probabilities.
        rows = {named["prev_logprobs"]: 0.0, **values}
        phases = {phase: rows[name] for phase, name in named.items()}
        bars[arm] = phases | {"rest": steps[arm] - sum(phases.values())}
    return bars


def _workload(row: str) -> str:
    """Return the workload that a row's name ends in: of `8gpu` and `a12_8gpu` the longer one."""
    return max((name for name in WORKLOADS if row.endswith(f"_{name}")), key=len, default="")


def labelled(
    values: Mapping[str, float], workloads: Sequence[str], without: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Return the bars of several workloads: what to call one -> phase -> s.

    Args:
        values: name of a row -> value.
        workloads: their names; bars say theirs where there are several.
        without: arms to leave out.
    """
    return {
        _NAMES.get(arm, f"qarl_nemo, {arm}") + (f", {workload}" if len(workloads) > 1 else ""): phases
        for workload in workloads
        for arm, phases in phase_bars(values, workload).items()
        if arm not in without
    }


def draw(bars: Mapping[str, Mapping[str, float]], file: Path) -> None:
    """Write the figure.

    Args:
        bars: as `labelled` returns them.
        file: the PNG.
    """
    with report_style():
        figure = new_figure(8.0, 1.3 + 0.5 * len(bars))
        axes = figure.subplots()
        labels = list(bars)
        left = np.zeros(len(bars))
        for phase in (*_COMPUTED, "rest"):
            seconds = np.array([phases[phase] for phases in bars.values()])
            color = PHASE_COLORS.get(phase, OTHER_COLOR)
            axes.barh(labels, seconds, left=left, color=color, label=_COMPUTED.get(phase, phase), height=0.62)
            left += seconds
        for place, total in enumerate(left):
            axes.text(total, place, f" {total:.1f} s", va="center", color=INK)
        axes.set_xlabel("time of a step (s)")
        axes.set_xlim(0, 1.1 * left.max())
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, borderaxespad=0.3, handlelength=1.2)
        figure.savefig(file, dpi=130)


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file of docs/results")
    parser.add_argument("figure", type=Path, help="PNG to write")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeat for several; default a")
    chosen = parser.add_mutually_exclusive_group()
    for flag in ("--without", "--only"):
        chosen.add_argument(flag, action="append", default=[], metavar="ARM", help="repeat for several")
    arguments = parser.parse_args()
    workloads = arguments.workload or ["a"]
    try:
        values = {row.name: row.value for row in read_results(arguments.results)}
    except ValueError as error:
        parser.error(str(error))
    if missing := [workload for workload in workloads if not phase_bars(values, workload)]:
        parser.error(f"{arguments.results} has no full_step_s_..._{' or '.join(missing)}")
    arms = {arm for workload in workloads for arm in phase_bars(values, workload)}
    for flag, named in (("--without", arguments.without), ("--only", arguments.only)):
        if unknown := sorted({*named} - arms):
            parser.error(f"{flag} {' '.join(unknown)}: there are {' '.join(sorted(arms))}")
    without = arms - {*arguments.only} if arguments.only else {*arguments.without}
    if arms == without:
        parser.error("--without leaves no arm")
    try:
        draw(labelled(values, workloads, without), arguments.figure)
    except (OSError, ValueError) as error:
        parser.error(f"{arguments.figure}: {os_reason(error) if isinstance(error, OSError) else error}")


if __name__ == "__main__":
    main()
