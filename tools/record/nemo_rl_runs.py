"""Turn NeMo-RL log folders of QaRL runs into rows of docs/results.

    python tools/record/nemo_rl_runs.py --run bf16=logs/bf16 --run w4a16=logs/w4a16

The run called `bf16` is the floor by whose gap and step time the others' are divided. Names may have a suffix
(`w4a16_ep2` with `bf16_ep2`). If a log folder was lost, the driver's output can stand in for it. That, and NeMo-RL's
own runs, need the run.json of another run on the same host: `--run w4a16=driver.txt --facts logs/bf16/exp_001/run.json
--command "python ..."`.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from rows import parser_of

from qarl_formats import BASELINE, FORMAT_NAMES, NARROW_NAMES
from qarl_nemo.metrics.nemo_rl_logs import read_facts, step_record
from qarl_nemo.metrics.report.timings import phase_seconds
from qarl_nemo.metrics.results import Figure, record_figures
from qarl_nemo.metrics.runs import Run, load_run
from qarl_nemo.metrics.summary import summarize_run

_STEP = "timing/step_s"
# The first steps compile and warm up.
WARM_UP_STEPS = 3
# One run has to show that it learns, which takes this many steps; the others only show that they run.
LEARNS, ENOUGH_STEPS = "w4a16", 100.0
# What NeMo-RL prints for a step: `  * Avg Reward: 0.1250`, `  * generation: 0.74s (12.9%)`, each with a bullet.
_PRINTED_STEP = re.compile(r"=+ Step (\d+)/")
_PRINTED = re.compile(r"\s*\u2022 ([^:]+): (-?[\d.]+)s?(?: \(|$)")
_PRINTED_NAMES = {
    "Loss": "train/loss",
    "Avg Reward": "train/reward",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
    "Total step time": "timing/train/total_step_time",
}


def read_run(path: Path) -> Run:
    """Read a log folder, or what NeMo-RL printed."""
    if path.is_dir():
        return load_run(path)
    records = read_console(path)
    if not records:
        raise ValueError(f"{path}: NeMo-RL printed no finished step there")
    keys = sorted({key for record in records for key in record} - {"step"})
    columns = {key: np.array([record.get(key, math.nan) for record in records]) for key in keys}
    steps = np.array([record["step"] for record in records], float)
    return Run(path, path.stem, path.stem, {}, steps, columns, None, [], [], ())


def read_console(file: Path) -> list[dict[str, Any]]:
    """Read what NeMo-RL printed about a run's finished steps, for a run whose log folder was lost.

    Args:
        file: the driver's output.

    Returns:
        Records with `step`, ascending, without the metrics that NeMo-RL does not print; where a later start repeated
        steps, its own.
    """
    steps: dict[int, dict[str, float]] = {}
    current: dict[str, float] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        step, value = _PRINTED_STEP.search(line), _PRINTED.match(line)
        if step:
            steps = {earlier: values for earlier, values in steps.items() if earlier < int(step[1])}
            current = steps[int(step[1])] = {}
        elif value:
            name = _PRINTED_NAMES.get(value[1], f"timing/train/{value[1]}")
            current.setdefault(name, float(value[2]))
    finished = {step: values for step, values in steps.items() if "timing/train/total_step_time" in values}
    return [{"step": step} | step_record(values, {}) for step, values in sorted(finished.items())]


def run_figures(name: str, run: Run, baseline: Run | None) -> list[Figure]:
    """Return one run's figures.

    Args:
        name: the rows' prefix.
        run: the run.
        baseline: the BF16 run beside it on the same hardware, if there is one.

    Returns:
        run_steps, reward_rise, gap, phase_s of every phase, refit_s, and over the baseline gap_ratio and step_speedup.
    """
    summary = summarize_run(run)
    rise = summary["reward_final"] - summary["reward_first"]
    # A stopped run has logged only part of its last step.
    finished = np.isfinite(run.column(_STEP))
    step_s = median(run.column(_STEP)[finished])
    figures = [
        Figure(f"run_steps_{name}", float(finished.sum()), "steps", ">=", ENOUGH_STEPS if name == LEARNS else None),
        Figure(f"reward_rise_{name}", rise, "", ">="),
        Figure(f"reward_final_{name}", summary["reward_final"], "", ">="),
        Figure(f"gap_{name}", summary["abs_gap_mean"], "nats", "<="),
        Figure(f"step_s_{name}", step_s, "s", "<="),
        Figure(f"refit_s_{name}", median(run.column("refit/total_s")), "s", "<="),
    ]
    figures += [
        Figure(f"phase_s_{phase}_{name}", median(values[finished]), "s", "<=")
        for phase, values in phase_seconds(run).items()
    ]
    if baseline is not None:
        # Gaps shrink as a policy grows more certain, so compare only the steps that both have.
        common = min(len(run.steps), len(baseline.steps))
        gap, floor = (np.nanmean(one.column("mismatch/abs_gap_mean")[:common]) for one in (run, baseline))
        figures.append(Figure(f"gap_ratio_{name}", float(gap / floor) if floor else math.nan, "", "<="))
        figures.append(Figure(f"step_speedup_{name}", median(baseline.column(_STEP)) / step_s, "", ">="))
    return figures


def median(values: np.ndarray) -> float:
    """Return the median of the finite values after warm-up, or of all in a run that has no more steps than that."""
    later = values[WARM_UP_STEPS:] if len(values) > WARM_UP_STEPS else values
    finite = later[np.isfinite(later)]
    return float(np.median(finite)) if len(finite) else math.nan


def baseline_of(name: str, runs: dict[str, Run]) -> Run | None:
    """Return the BF16 run with the suffix of `name`, unless `name` is it."""
    formats = {*FORMAT_NAMES, *NARROW_NAMES} - {BASELINE}
    fmt = next((fmt for fmt in formats if name == fmt or name.startswith(f"{fmt}_")), None)
    return runs.get(BASELINE + name.removeprefix(fmt)) if fmt else None


def main() -> None:
    """Record what the command line names."""
    parser = parser_of(__doc__, "nemo_rl")
    parser.add_argument("--run", action="append", required=True, metavar="NAME=LOG_DIR", help="repeat for several")
    parser.add_argument("--facts", type=Path, help="run.json for runs that are a driver's output")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        default=("",),
        metavar="FIGURE,...",
        help="figures whose names begin so: gap,run_steps where other programs shared the GPU",
    )
    parser.add_argument("--command", help="what measures it again, where run.json's has paths of its own")
    arguments = parser.parse_args()
    folders = dict(text.split("=", 1) for text in arguments.run)
    runs = {name: read_run(Path(folder)) for name, folder in folders.items()}
    given = json.loads(arguments.facts.read_text()) if arguments.facts else None
    for name, run in runs.items():
        lost = run.path.is_file() or not any(run.path.rglob("run.json"))
        facts = given if lost and given else read_facts(run.path)
        facts |= {"command": arguments.command} if arguments.command else {}
        facts = {key: facts[key] for key in ("hardware", "versions", "command")}
        figures = run_figures(name, run, baseline_of(name, runs))
        record_figures(arguments.record, (one for one in figures if one.name.startswith(arguments.only)), **facts)


if __name__ == "__main__":
    main()
