"""Turn finished runs into rows of docs/results: the demo, a comparison's arms and seeds, runs with vLLM."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rows import parser_of, record, slug, vllm_version

from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import Figure, result_rows
from qarl_nemo.metrics.runs import Run, load_run
from qarl_nemo.metrics.summary import summarize_run

DEMO = "qarl train examples/configs/local_demo.yaml"
COMPARE = "qarl train examples/configs/local_compare.yaml"
ON_CPU = (
    "-m support.megatron.run_rank",
    "compare=null device=cpu policy.precision=float32 rollout._override_=true rollout.engine=packed "
    "rollout.max_new_tokens=4, and each arm's qarl.*",
)
PHASES = ("rollout", "prev_logprobs", "update", "refit")


def demo_rows(run: Run, device: str) -> list[dict]:
    """Return time, reward ratio, gap and throughput of the demo."""
    summary = summarize_run(run)
    figures = [
        Figure("demo_train_s", summary["time_s"], "s", "<=", 180.0),
        Figure("reward_ratio", summary["reward_ratio"], "", ">=", 2.0),
        Figure("demo_reward_first", summary["reward_first"], "", ">="),
        Figure("demo_reward_final", summary["reward_final"], "", ">="),
        Figure("demo_aligned_gap", summary["abs_gap_mean"], "nats", "<="),
    ]
    for phase in ("rollout", "prev_logprobs", "update"):
        figures.append(Figure(f"{phase}_tokens_s", _median(run, f"throughput/{phase}_tokens_s"), "tokens/s", ">="))
    figures.append(Figure("refit_s", _median(run, "timing/refit_s"), "s", "<="))
    return result_rows(figures, hardware=hardware(device), versions=versions(), command=_on(DEMO, device))


def compare_rows(runs: list[Run], device: str) -> list[dict]:
    """Return every arm's and seed's final reward, and each arm's mean |logprob gap| over seeds."""
    figures: list[Figure] = []
    gaps: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        arm, summary = slug(run.setting("run.arm")), summarize_run(run)
        figures.append(Figure(f"compare_{arm}_seed{run.seed}", summary["reward_final"], "", ">="))
        gaps.setdefault((run.setting("qarl.alignment"), run.setting("qarl.format")), []).append(summary["abs_gap_mean"])
    for (alignment, fmt), values in gaps.items():
        figures.append(Figure(f"{alignment}_gap_{fmt}", float(np.mean(values)), "nats", "<="))
    return result_rows(figures, hardware=hardware(device), versions=versions(), command=_on(COMPARE, device))


def vllm_rows(folder: Path, device: str) -> list[dict]:
    """Return the figures of runs with vLLM: all of a single run's, or each arm's gap and reward in a comparison.

    Args:
        folder: run directory, or a folder of an arm's run directories, named like its config.
        device: what the runs ran on.

    Returns:
        The rows, named after config, arm and figure.
    """
    command, prefix = f"qarl train examples/configs/{folder.name}.yaml", folder.name.removeprefix("local_")
    arms = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    figures: list[Figure] = []
    for run in map(load_run, arms or [folder]):
        name = f"{prefix}_{slug(run.setting('run.arm'))}" if arms else prefix
        if not arms:
            figures.append(Figure(f"{name}_steps", float(len(run.steps)), "", ">="))
        figures += _run_figures(name, run, () if arms else PHASES)
    engines = versions() | vllm_version(device)
    return result_rows(figures, hardware=hardware(device), versions=engines, command=command)


def megatron_rows(folder: Path, device: str) -> list[dict]:
    """Return the figures of arms with a Megatron learner: steps, reward, gap and, on GPUs, seconds.

    Args:
        folder: holds the arms' run directories, named like its config.
        device: what the runs ran on.

    Returns:
        The rows, named after arm and figure; all but `steps` are over the steps that every arm has.
    """
    import megatron.core

    config = f"examples/configs/{folder.name}.yaml"
    engines = versions() | {"megatron-core": megatron.core.__version__}
    if device == "cuda":
        import transformer_engine

        prefix, command, phases = "megatron", f"qarl train {config}", PHASES
        engines |= vllm_version(device) | {"transformer-engine": transformer_engine.__version__}
    else:
        # Seconds on a shared CPU mean nothing.
        prefix, command, phases = "megatron_cpu", f"PYTHONPATH=tests python {ON_CPU[0]} {config} {ON_CPU[1]}", ()
    runs = [load_run(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))]
    figures = arm_figures(runs, prefix, phases)
    return result_rows(figures, hardware=hardware(device, num_gpus=2), versions=engines, command=command)


def arm_figures(runs: list[Run], prefix: str, phases: Sequence[str]) -> Iterator[Figure]:
    """Yield the arms' figures over the steps that all have.

    Args:
        runs: one run of each arm.
        prefix: prefix of the figures' names.
        phases: phases whose median seconds are included.

    Yields:
        The figures.
    """
    common = min(len(run.steps) for run in runs)
    for run in runs:
        arm, cut = f"{prefix}_{slug(run.setting('run.arm'))}", _first_steps(run, common)
        yield Figure(f"{arm}_steps", float(len(run.steps)), "", ">=")
        yield from _run_figures(arm, cut, phases)


def _run_figures(name: str, run: Run, phases: Sequence[str]) -> Iterator[Figure]:
    summary = summarize_run(run)
    yield Figure(f"{name}_reward_first", summary["reward_first"], "", ">=")
    yield Figure(f"{name}_reward_final", summary["reward_final"], "", ">=")
    yield Figure(f"{name}_gap", summary["abs_gap_mean"], "nats", "<=")
    for phase in phases:
        yield Figure(f"{name}_{phase}_s", _median(run, f"timing/{phase}_s"), "s", "<=")


def _first_steps(run: Run, count: int) -> Run:
    return replace(run, steps=run.steps[:count], columns={key: values[:count] for key, values in run.columns.items()})


def _median(run: Run, column: str) -> float:
    return float(np.nanmedian(run.column(column)))


def _on(command: str, device: str) -> str:
    return command + (" device=cuda" if device == "cuda" else "")


def main() -> None:
    """Read run directories, append rows, print them."""
    parser = parser_of(__doc__, "local")
    parser.add_argument("--demo", type=Path, help="run directory of local_demo.yaml")
    parser.add_argument("--compare", type=Path, help="folder of local_compare.yaml's run directories")
    parser.add_argument(
        "--vllm", type=Path, nargs="+", default=[], help="run directories, or folders, of local_vllm*.yaml"
    )
    parser.add_argument("--megatron", type=Path, help="folder of local_megatron.yaml's run directories")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the runs ran on")
    arguments = parser.parse_args()
    rows = demo_rows(load_run(arguments.demo), arguments.device) if arguments.demo else []
    if arguments.compare:
        folders = sorted(path.parent for path in arguments.compare.glob("*/metrics.jsonl"))
        rows += compare_rows([load_run(folder) for folder in folders], arguments.device)
    for folder in arguments.vllm:
        rows += vllm_rows(folder, arguments.device)
    if arguments.megatron:
        rows += megatron_rows(arguments.megatron, arguments.device)
    record(arguments.record, rows)


if __name__ == "__main__":
    main()
