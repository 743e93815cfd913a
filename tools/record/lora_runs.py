"""Turn runs with adapters into rows: reward, accuracy, entropy and gap of every run.

    qarl train examples/configs/local_gsm8k_lora.yaml --parallel 3
    python tools/record/lora_runs.py runs/local_gsm8k_lora

A row is `lora_<figure>_<arm>_seed<seed>`; `entropy` is the sampling policy's, with noise also stage by stage.
`gap_ratio` divides a run's gap by that of the run which trains all weights in the same format from the same seed.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from real_model_runs import record_runs, scores_of, whole_runs
from rows import parser_of, slug

from qarl_nemo.metrics.results import Figure
from qarl_nemo.metrics.runs import Run
from qarl_nemo.metrics.summary import finite_mean, summarize_run

# An adapter run's gap over the plain format's.
GOAL = 1.5


def figures(runs: list[Run]) -> Iterator[Figure]:
    """Yield the figures of every run.

    Yields:
        The reward of the last ten steps and of all, the last accuracy, entropies, the gap, and its ratio.
    """
    plain = {_setting(run): run for run in runs if not run.setting("policy.lora")}
    for run in runs:
        arm = f"{slug(run.setting('run.arm')).removeprefix('lora_')}_seed{run.seed}"
        summary, entropies = summarize_run(run), run.column("rollout/entropy_estimate")
        yield Figure(f"lora_reward_{arm}", summary["reward_final"], "", ">=")
        yield Figure(f"lora_reward_mean_{arm}", finite_mean(run.column("reward/mean")), "", ">=")
        yield Figure(f"lora_accuracy_{arm}", scores_of(run)["test"][-1], "", ">=")
        yield Figure(f"lora_entropy_{arm}", finite_mean(entropies), "nats", ">=")
        stages = run.column("noise/stage")
        for stage in np.unique(stages[np.isfinite(stages)]):
            mean = finite_mean(entropies[stages == stage])
            yield Figure(f"lora_entropy_stage{stage:.0f}_{arm}", mean, "nats", ">=")
        yield Figure(f"lora_gap_{arm}", summary["abs_gap_mean"], "nats", "<=")
        whole = plain.get(_setting(run))
        if whole is not None and whole is not run:
            ratio = summary["abs_gap_mean"] / summarize_run(whole)["abs_gap_mean"]
            yield Figure(f"lora_gap_ratio_{arm}", ratio, "", "<=", GOAL)


def _setting(run: Run) -> tuple[object, ...]:
    return (*(run.setting(f"qarl.{key}") for key in ("alignment", "format", "group_size")), run.seed)


def main() -> None:
    """Read the run directories, append rows, print them."""
    parser = parser_of(__doc__, "lora")
    parser.add_argument("folder", type=Path, help="the arms' run directories, named like its config")
    arguments = parser.parse_args()
    runs = whole_runs(arguments.folder)
    record_runs(arguments.record, figures(runs), runs, arguments.folder.resolve().name)


if __name__ == "__main__":
    main()
