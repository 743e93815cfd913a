"""Turn the arms of a comparison on a real model into rows: reward, accuracy, gap and error tokens of every run.

    qarl train examples/configs/local_gsm8k_arms.yaml --parallel 3
    python tools/record/real_model_runs.py runs/local_gsm8k_arms --model qwen2.5-coder-0.5b --data gsm8k
    python tools/record/real_model_runs.py runs/local_math_arms --model qwen2.5-coder-1.5b --data math

Arms are called BF16, `rollout-only FORMAT` and `QaRL FORMAT`; what follows a comma is another objective. A format's
recovery, (QaRL - rollout-only) / (BF16 - rollout-only) of the paired seeds' mean accuracies, is a row only where
rollout-only is behind BF16 by more than two standard errors of the paired difference.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from rows import parser_of, record, slug, vllm_version

from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import Figure, result_rows
from qarl_nemo.metrics.runs import Run, load_run
from qarl_nemo.metrics.summary import summarize_run

_BASELINE, _ROLLOUT_ONLY, _QARL = "BF16", "rollout-only ", "QaRL "
_STANDARD_ERRORS = 2.0


def run_figures(run: Run, prefix: str, accuracies: Sequence[float] | None = None) -> list[Figure]:
    """Return a run's figures; `reward_final` is the mean of its last ten steps.

    Args:
        run: the run.
        prefix: begins the names, `real_<model>_<data>`.
        accuracies: on the test set, the first and the last of which are recorded; None = the run's validations.

    Returns:
        The figures.
    """
    name, summary = f"{prefix}_{slug(run.setting('run.arm'))}_seed{run.seed}", summarize_run(run)
    accuracies = accuracies or _accuracies(run)
    return [
        Figure(f"{name}_steps", summary["num_steps"], "", ">="),
        Figure(f"{name}_reward_first", summary["reward_first"], "", ">="),
        Figure(f"{name}_reward_final", summary["reward_final"], "", ">="),
        Figure(f"{name}_test_accuracy_first", accuracies[0], "", ">="),
        Figure(f"{name}_test_accuracy", accuracies[-1], "", ">="),
        Figure(f"{name}_gap", summary["abs_gap_mean"], "nats", "<="),
        Figure(f"{name}_error_tokens", summary["error_token_rate"], "fraction", "<="),
    ]


def recoveries(runs: list[Run], prefix: str) -> list[Figure]:
    """Return each format's recovery, where there is something to recover, and print the paired differences.

    Args:
        runs: all runs, of one length.
        prefix: begins the names.

    Returns:
        The figures.
    """
    accuracy = {(run.setting("run.arm"), run.seed): _accuracies(run)[-1] for run in runs}
    arms = {arm for arm, _ in accuracy}
    figures = []
    for fmt in sorted(arm.removeprefix(_QARL) for arm in arms if arm.startswith(_QARL) and "," not in arm):
        names = (_BASELINE, _ROLLOUT_ONLY + fmt, _QARL + fmt)
        seeds = sorted({run.seed or 0 for run in runs})
        seeds = [seed for seed in seeds if all((name, seed) in accuracy for name in names)]
        if not seeds:
            continue
        bf16, rollout_only, qarl = (np.array([accuracy[name, seed] for seed in seeds]) for name in names)
        lost, gained = bf16 - rollout_only, qarl - rollout_only
        error = float(np.std(lost, ddof=1) / np.sqrt(len(seeds))) if len(seeds) > 1 else float("nan")
        print(f"{fmt}, seeds {seeds}: BF16 - rollout-only {lost.round(4)}, QaRL - rollout-only {gained.round(4)}")
        if lost.mean() > _STANDARD_ERRORS * error:
            figures.append(Figure(f"{prefix}_recovery_{fmt}", float(gained.mean() / lost.mean()), "", ">=", 0.8))
    return figures


def whole_runs(folder: Path) -> list[Run]:
    """Return the runs of a folder of arms that did all of their steps, and print which did not."""
    whole = []
    for run in (load_run(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))):
        if len(run.steps) == run.setting("grpo.max_num_steps"):
            whole.append(run)
        else:
            print(f"{run.name}: left out, {len(run.steps)} of {run.setting('grpo.max_num_steps')} steps")
    return whole


def record_runs(path: Path, figures: Iterable[Figure], runs: list[Run], config: str, device: str) -> None:
    """Append the figures of runs, with what computed them.

    Args:
        path: file of docs/results.
        figures: what the runs gave.
        runs: the runs.
        config: the name of their config.
        device: what they ran on, `cpu` or `cuda`.
    """
    served = any(run.setting("rollout.engine") == "vllm" for run in runs)
    facts = {"hardware": hardware(device), "versions": versions() | (vllm_version(device) if served else {})}
    record(path, result_rows(figures, command=f"qarl train examples/configs/{config}.yaml", **facts))


def _accuracies(run: Run) -> list[float]:
    values = run.column("validation/reward")
    return values[np.isfinite(values)].tolist()


def main() -> None:
    """Read the run directories, append rows, print them."""
    parser = parser_of(__doc__, "real_model")
    parser.add_argument("folder", type=Path, help="holds the arms' run directories, named like its config")
    parser.add_argument("--model", required=True, help="for the rows' names, e.g. qwen2.5-coder-0.5b")
    parser.add_argument("--data", required=True, help="for the rows' names, e.g. gsm8k")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what the runs ran on")
    arguments = parser.parse_args()
    whole = whole_runs(arguments.folder)
    prefix = f"real_{arguments.model}_{arguments.data}"
    figures = [figure for run in whole for figure in run_figures(run, prefix)] + recoveries(whole, prefix)
    record_runs(arguments.record, figures, whole, arguments.folder.resolve().name, arguments.device)


if __name__ == "__main__":
    main()
