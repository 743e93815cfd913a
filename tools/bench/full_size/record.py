"""Turn an arm's logs into rows of docs/results/full_size.json.

python tools/bench/full_size/record.py WORK/a24/w4a16 --over WORK/a24/nemo_rl_best

NeMo-RL's own launcher writes no run.json: `--facts` takes that of another arm of the same host, and what only our
workers log has no row.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from arms import Placement
from phase_memory import Figures, memory_figures, start_seconds
from workloads import WORKLOADS, Workload

from qarl_nemo.files import FileError, read_json
from qarl_nemo.metrics.nemo_rl_logs import read_facts
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.metrics.results import Figure, record_figures
from qarl_nemo.metrics.runs import Run, load_run

PHASES = ("rollout", "reward", "logprob_prep", "prev_logprobs", "training_prep", "update", "refit")
COMPUTED = ("rollout", "prev_logprobs", "update")
# Parts of a refit's phase in their order, which only our workers log. The refit itself is from `publish` to `replace`;
# the others let learner and engine share a GPU, and `publish` may begin while engines wake up.
REFIT_PARTS = (
    "make_room",
    "wake_weights",
    "publish",
    "announce",
    "transfer",
    "verify",
    "replace",
    "leave",
    "wake_cache",
)
GOALS = {
    "full_step_s_w4a16_a": 30.0,
    "full_refit_s": 1.0,
    "full_other_share": 0.12,
    "full_update_tokens_s_gpu": 8000.0,
    "full_logprob_tokens_s_gpu": 20000.0,
    "full_memory_error": 0.05,
    "full_memory_host_error": 0.05,
    "full_start_s": 150.0,
    "full_tokens_s_gpu_w4a16_b": 2500.0,
}
# Those of one format, by its arm; no other arm was promised them.
GOALS_OF = {
    "w4a16": {"full_step_ratio": 0.40, "full_step_over_nemo_rl_best": 0.67, "full_step_over_own_bf16": 0.67},
    "fp8_block": {"full_step_over_nemo_rl_best": 0.70, "full_step_over_own_bf16": 0.70},
}
_STEP = "timing/step_s"
# A forward takes about a third of an update; less than this part of one is what NeMo-RL's loop needs to skip it.
_NO_FORWARD = 0.01
# A spread of steps beyond which a ratio of medians may be the host's doing; steady hosts were within 0.04.
_UNSTEADY = 0.1
# What a ratio's row is called, by the other arm; any other is `full_step_over_<arm>`.
_RATIOS = {"nemo_rl": "full_step_ratio", "bf16": "full_step_over_own_bf16"}


@dataclass(frozen=True)
class Timed:
    """An arm that ran.

    Attributes:
        folder: with its logs, and facts.json as `run.py` wrote it.
        arm: as rows call it.
        workload: its name.
        work: what a step asked of the host.
        placement: where learner and engines were.
        command: what ran it.
        run: its logs.
        host: which host's; "" where nobody wrote it down.
    """

    folder: Path
    arm: str
    workload: str
    work: Workload
    placement: Placement
    command: str
    run: Run
    host: str
    SAID: ClassVar = ("arm", "workload", "placement", "command")

    @classmethod
    def read(cls, folder: Path) -> "Timed":
        """Read the folder of an arm; ValueError where it cannot be."""
        file = folder / "facts.json"
        said = require_keys(file, read_json(file, "what run.py wrote of an arm"), cls.SAID)
        work = _workload(file, said)
        placement = Placement.parse(said["placement"], work.gpus)
        names = {name: said[name] for name in ("arm", "workload", "command")}
        run, host = load_run(folder / "logs"), said.get("host", "")
        return cls(folder, work=work, placement=placement, run=run, host=host, **names)

    def steps(self, skip: Sequence[int]) -> list[int]:
        """Return the steps that count, none that a run died in; ValueError if none does."""
        steps = [int(step) for step in self.run.steps[np.isfinite(self.run.column(_STEP))]]
        counted = [step for step in steps if step not in skip]
        if not counted:
            raise ValueError(f"{self.folder}: it has steps {steps}, and --skip leaves none to count")
        return counted

    def column(self, key: str, skip: Sequence[int]) -> np.ndarray:
        """Return a column of the steps that count; NaN without the column."""
        return self.run.column(key)[np.isin(self.run.steps, self.steps(skip))]

    def median(self, key: str, skip: Sequence[int]) -> float:
        """Return a column's median over the steps that count; NaN without the column."""
        return float(np.median(self.column(key, skip)))

    def fastest(self, skip: Sequence[int]) -> float:
        """Return the seconds of the fastest step that counts."""
        return float(self.column(_STEP, skip).min())

    def spread(self, skip: Sequence[int]) -> float:
        """Return the slowest step that counts minus the fastest, as a part of their median."""
        seconds = self.column(_STEP, skip)
        return float(np.ptp(seconds) / np.median(seconds))


def _workload(file: Path, said: dict[str, Any]) -> Workload:
    """Return the workload that a run was given, or, of earlier runs, the one that it names."""
    if "work" not in said:
        if said["workload"] not in WORKLOADS:
            raise FileError(f"{file}: workload {said['workload']!r}; legal: {', '.join(WORKLOADS)}")
        return WORKLOADS[said["workload"]]
    try:
        return Workload.parse(said["work"])
    except TypeError as error:
        raise FileError(f"{file}: work is none that run.py writes: {error}") from error


def require_keys(file: Path, found: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return what a file holds; FileError if it lacks keys."""
    if lacking := [key for key in keys if key not in found]:
        raise FileError(f"{file}: it lacks {', '.join(lacking)}, as if another program wrote it")
    return found


def figures(timed: Timed, skip: Sequence[int]) -> Figures:
    """Return an arm's figures: name without the arm -> value, unit, direction.

    Args:
        timed: the arm.
        skip: steps that do not count: the first compiles, and a profiled one is slow.
    """
    step = timed.median(_STEP, skip)
    phases = _phases(timed, skip)
    tokens = timed.work.answers * (timed.work.prompt_tokens + timed.median("response_length_tokens/mean", skip))
    learned = tokens / timed.placement.learners
    other = step - sum(phases.get(name, 0.0) for name in COMPUTED)
    scored = phases.get("prev_logprobs", math.nan)
    found = {
        "full_step_s": (step, "s", "<="),
        "full_step_fastest_s": (timed.fastest(skip), "s", "<="),
        "full_step_spread": (timed.spread(skip), "", "<="),
        "full_tokens_s_gpu": (tokens / timed.work.gpus / step, "tokens/s", ">="),
        "full_update_tokens_s_gpu": (learned / phases["update"], "tokens/s", ">="),
        "full_logprob_tokens_s_gpu": (learned / scored, "tokens/s", ">="),
        "full_other_share": (other / step, "", "<="),
        "full_refit_s": (timed.median("refit/total_s", skip), "s", "<="),
        "full_refit_wait_s": (timed.median("refit/wait_s", skip), "s", "<="),
        "full_gap": (timed.median("mismatch/abs_gap_mean", skip), "nats", "<="),
        "full_optimizer_s": (timed.median("optim/step_s", skip), "s", "<="),
        **{f"full_phase_s_{name}": (value, "s", "<=") for name, value in phases.items()},
        **{f"full_refit_s_{part}": (timed.median(f"refit/{part}_s", skip), "s", "<=") for part in REFIT_PARTS},
    }
    return {name: figure for name, figure in found.items() if math.isfinite(figure[0])}


def _phases(timed: Timed, skip: Sequence[int]) -> dict[str, float]:
    """Return the seconds of each phase, without `prev_logprobs` where `force_on_policy_ratio` left it out."""
    phases = {name: timed.median(f"timing/{name}_s", skip) for name in PHASES}
    if math.isnan(phases["prev_logprobs"]) or phases["prev_logprobs"] <= _NO_FORWARD * phases["update"]:
        del phases["prev_logprobs"]
    return phases


def ratios(timed: Timed, others: Sequence[Timed], skip: Sequence[int]) -> Figures:
    """Return an arm's step time over that of other arms of the same host and workload: medians, and fastest steps.

    Raises:
        ValueError: another arm had another workload or ran on another host, or is the same arm.
    """
    wrong = [
        f"{other.folder}: {other.workload}"
        for other in others
        if (other.workload, other.work) != (timed.workload, timed.work)
    ]
    if wrong:
        raise ValueError(f"{timed.folder} ran {timed.workload}, and what it is compared with another workload: {wrong}")
    if apart := [str(other.folder) for other in others if timed.host and other.host not in ("", timed.host)]:
        raise ValueError(f"{timed.folder} ran on another host than {', '.join(apart)}, and hosts differ by a tenth")
    if same := [str(other.folder) for other in others if other.arm == timed.arm]:
        raise ValueError(f"{timed.folder}: {timed.arm} is compared with itself in {', '.join(same)}")
    found: Figures = {}
    for other in others:
        name = _RATIOS.get(other.arm, f"full_step_over_{other.arm}")
        found[name] = (timed.median(_STEP, skip) / other.median(_STEP, skip), "", "<=")
        found[f"{name}_fastest"] = (timed.fastest(skip) / other.fastest(skip), "", "<=")
    return found


def scaling(timed: Timed, fewer: Timed, skip: Sequence[int]) -> Figures:
    """Return the figure that says how much of a GPU's speed is left on more GPUs, as `figures` does.

    Args:
        timed: the arm on more GPUs.
        fewer: the same arm with as much work a GPU.
        skip: steps that do not count.

    Raises:
        ValueError: the second has no fewer GPUs, or the two differ in more than that.
    """
    alike = replace(fewer.work, gpus=timed.work.gpus, answers=fewer.work.answers * timed.work.gpus // fewer.work.gpus)
    if timed.arm != fewer.arm or timed.work != alike or fewer.work.gpus >= timed.work.gpus:
        raise ValueError(
            f"{timed.folder} is {timed.arm} with {timed.work}, and {fewer.folder} is not the same on fewer GPUs with "
            f"as much work a GPU: {fewer.arm} with {fewer.work}"
        )
    efficiency = fewer.median(_STEP, skip) / timed.median(_STEP, skip)
    return {f"full_scaling_efficiency_from_{fewer.work.gpus}gpu": (efficiency, "", ">=")}


def goal_of(name: str, arm: str, workload: str) -> float | None:
    """Return what a figure is to reach; None if nothing was promised.

    Args:
        name: the figure's, without arm and workload.
        arm: as rows call it; one with a label or a placement has no format's goals.
        workload: its name.
    """
    # Other goals are those of the whole model at its best settings.
    if workload not in ("a", "b") and name not in ("full_memory_error", "full_memory_host_error"):
        return None
    return (GOALS | GOALS_OF.get(arm, {})).get(name, GOALS.get(f"{name}_{arm}_{workload}"))


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the arm's, as run.py left it")
    parser.add_argument("--record", type=Path, default=Path("docs/results/full_size.json"), help="file to append to")
    parser.add_argument("--skip", default="", metavar="STEP,...", help="steps that do not count, beside the first")
    parser.add_argument("--facts", type=Path, help="run.json of another arm, where this one has none")
    parser.add_argument(
        "--over", type=Path, action="append", default=[], metavar="FOLDER", help="an arm to compare with; repeat"
    )
    parser.add_argument("--scaling-from", type=Path, metavar="FOLDER", help="the same arm on fewer GPUs")
    arguments = parser.parse_args()
    try:
        skip = _skipped(arguments.skip)
        timed = Timed.read(arguments.folder)
        measured = figures(timed, skip) | ratios(timed, [Timed.read(other) for other in arguments.over], skip)
        if arguments.scaling_from:
            measured |= scaling(timed, Timed.read(arguments.scaling_from), skip)
        facts = _facts(arguments.facts, timed.folder)
        asynchronous = timed.placement.asynchronous
        measured |= memory_figures(timed.folder, timed.run, timed.steps(skip), asynchronous=asynchronous)
        if not asynchronous:
            measured["full_start_s"] = (start_seconds(timed.folder, timed.run), "s", "<=")
    except ValueError as error:
        parser.error(str(error))
    found = []
    for name, (value, unit, op) in measured.items():
        row = f"{name}_{timed.arm}_{timed.workload}"
        found.append(Figure(row, value, unit, op, goal_of(name, timed.arm, timed.workload)))
    facts = {"hardware": facts["hardware"], "versions": facts["versions"], "command": timed.command}
    made = record_figures(arguments.record, found, **facts)
    print(f"{len(made)} rows of steps {timed.steps(skip)} in {arguments.record}")
    if timed.spread(skip) > _UNSTEADY:
        took = ", ".join(f"{seconds:.1f}" for seconds in timed.column(_STEP, skip))
        print(
            f"hint: steps took {took} s: on a host as unsteady compare the fastest ones, or run more (run.py --steps)"
        )


def _skipped(text: str) -> list[int]:
    words = [word for word in text.split(",") if word]
    if wrong := [word for word in words if not word.isdecimal()]:
        raise ValueError(f"--skip: {', '.join(map(repr, wrong))} is not a step's number")
    return [1, *map(int, words)]


def _facts(file: Path | None, folder: Path) -> dict[str, Any]:
    """Return hardware and versions, from a file or from the logs of an arm."""
    place = file or folder / "logs" / "exp_*" / FACTS_FILE
    found = read_json(file, "facts") if file else read_facts(folder / "logs")
    return require_keys(place, found, ("hardware", "versions"))


if __name__ == "__main__":
    main()
