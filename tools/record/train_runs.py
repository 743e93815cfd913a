"""Turn finished runs of the demo, the comparison, vLLM and Megatron into rows of docs/results.

python tools/record/train_runs.py runs/local_demo
python tools/record/train_runs.py runs/local_compare
python tools/record/train_runs.py runs/local_vllm_gpu_formats
python tools/record/train_runs.py runs/local_megatron
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from real_model_runs import ran_on, record_runs
from rows import parser_of, slug

from qarl_nemo.metrics.events import METRICS_FILE
from qarl_nemo.metrics.results import Figure
from qarl_nemo.metrics.runs import Run, load_run
from qarl_nemo.metrics.summary import summarize_run

PHASES = ("rollout", "prev_logprobs", "update", "refit")


def demo_figures(run: Run) -> Iterator[Figure]:
    """Yield time, reward ratio, gap and throughput of the demo."""
    summary = summarize_run(run)
    yield Figure("demo_train_s", summary["time_s"], "s", "<=", 180.0)
    yield Figure("reward_ratio", summary["reward_ratio"], "", ">=", 2.0)
    yield Figure("demo_reward_first", summary["reward_first"], "", ">=")
    yield Figure("demo_reward_final", summary["reward_final"], "", ">=")
    yield Figure("demo_aligned_gap", summary["abs_gap_mean"], "nats", "<=")
    for phase in ("rollout", "prev_logprobs", "update"):
        yield Figure(f"{phase}_tokens_s", _median(run, f"throughput/{phase}_tokens_s"), "tokens/s", ">=")
    yield Figure("refit_s", _median(run, "timing/refit_s"), "s", "<=")


def compare_figures(runs: list[Run]) -> Iterator[Figure]:
    """Yield every arm's and seed's final reward, and each arm's mean |logprob gap| over seeds."""
    gaps: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        arm, summary = slug(run.setting("run.arm")), summarize_run(run)
        yield Figure(f"compare_{arm}_seed{run.seed}", summary["reward_final"], "", ">=")
        gaps.setdefault((run.setting("qarl.alignment"), run.setting("qarl.format")), []).append(summary["abs_gap_mean"])
    for (alignment, fmt), values in gaps.items():
        yield Figure(f"{alignment}_gap_{fmt}", float(np.mean(values)), "nats", "<=")


def vllm_figures(runs: list[Run], prefix: str) -> Iterator[Figure]:
    """Yield all figures of a single run with vLLM, or each arm's gap and reward in a comparison."""
    for run in runs:
        arm = run.setting("run.arm")
        if arm is None:
            yield Figure(f"{prefix}_steps", float(len(run.steps)), "", ">=")
        yield from _run_figures(f"{prefix}_{slug(arm)}" if arm else prefix, run, () if arm else PHASES)


def megatron_figures(runs: list[Run]) -> Iterator[Figure]:
    """Yield each arm's figures over the steps that all have, and how many it has.

    Yields:
        Steps, reward, gap and, on GPUs, seconds.
    """
    # Seconds on a shared CPU mean nothing.
    on_cpu = " cores of " in ran_on(runs)["hardware"]
    prefix, phases = ("megatron_cpu", ()) if on_cpu else ("megatron", PHASES)
    common = min(len(run.steps) for run in runs)
    for run in runs:
        arm = f"{prefix}_{slug(run.setting('run.arm'))}"
        columns = {key: values[:common] for key, values in run.columns.items()}
        yield Figure(f"{arm}_steps", float(len(run.steps)), "", ">=")
        yield from _run_figures(arm, replace(run, steps=run.steps[:common], columns=columns), phases)


def _run_figures(name: str, run: Run, phases: Sequence[str]) -> Iterator[Figure]:
    summary = summarize_run(run)
    yield Figure(f"{name}_reward_first", summary["reward_first"], "", ">=")
    yield Figure(f"{name}_reward_final", summary["reward_final"], "", ">=")
    yield Figure(f"{name}_gap", summary["abs_gap_mean"], "nats", "<=")
    for phase in phases:
        yield Figure(f"{name}_{phase}_s", _median(run, f"timing/{phase}_s"), "s", "<=")


def _median(run: Run, column: str) -> float:
    return float(np.nanmedian(run.column(column)))


def main() -> None:
    """Read the run directories, append rows, print them."""
    parser = parser_of(__doc__, "local")
    parser.add_argument("folder", type=Path, help="run directory, or an arm's run directories, named like its config")
    parser.add_argument("--command", help="what measures it again, where overrides were given")
    arguments = parser.parse_args()
    config = arguments.folder.resolve().name
    arms = sorted(path.parent for path in arguments.folder.glob(f"*/{METRICS_FILE}"))
    runs = [load_run(path) for path in arms or [arguments.folder]]
    figures = {
        "local_demo": lambda: demo_figures(runs[0]),
        "local_compare": lambda: compare_figures(runs),
        "local_megatron": lambda: megatron_figures(runs),
    }.get(config, lambda: vllm_figures(runs, config.removeprefix("local_")))
    record_runs(arguments.record, figures(), runs, config, arguments.command)


if __name__ == "__main__":
    main()
