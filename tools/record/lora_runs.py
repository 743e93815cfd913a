r"""Turn runs with adapters into rows: reward, accuracy, entropy and gap of every run.

    qarl train examples/configs/local_gsm8k_lora.yaml --parallel 3
    python tools/record/lora_runs.py runs/local_gsm8k_lora --full-parameter real_qwen2.5-coder-0.5b_gsm8k \
        --figure docs/images/real_gsm8k_lora.png

A row is `lora_<figure>_<arm>_seed<seed>`; `entropy` is the sampling policy's, with noise also stage by stage. `_mean`
and `_error` instead of a seed are over all seeds in the file. `lora_gaps.py` says what `gap_ratio` divides by.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from kept_runs import keep_runs, kept
from lora_gaps import arm_of, gap_ratios
from real_model_runs import record_runs, scores_of, tested_at_its_end, whole_runs
from rows import new_figures, parser_of, seed_means

from qarl_nemo.memory import GIB
from qarl_nemo.metrics.report import write_summary_figure
from qarl_nemo.metrics.results import Figure, read_results
from qarl_nemo.metrics.runs import Run
from qarl_nemo.metrics.summary import finite_mean, summarize_run

# Not of stages and ratios, which a table shows seed by seed.
_AVERAGED = r"lora_(?:reward|accuracy|entropy|gap)_(?!stage|ratio)\w+"


def figures(runs: Iterable[Run]) -> Iterator[Figure]:
    """Yield the figures of every run.

    Yields:
        The reward of the first and the last steps, as many as `smoothing_window` says, and of all, the first accuracy
        and that of the last weights, where they were tested, entropies, the gap, and, of a run on a GPU, a step's
        seconds and its tensors' peak.
    """
    for run in runs:
        arm = arm_of(run)
        summary, entropies, scores = summarize_run(run), run.column("rollout/entropy_estimate"), scores_of(run)["test"]
        yield Figure(f"lora_reward_first_{arm}", summary["reward_first"], "", ">=")
        yield Figure(f"lora_reward_{arm}", summary["reward_final"], "", ">=")
        yield Figure(f"lora_reward_mean_{arm}", finite_mean(run.column("reward/mean")), "", ">=")
        if scores:
            yield Figure(f"lora_accuracy_first_{arm}", scores[0], "", ">=")
        if tested_at_its_end(run):
            yield Figure(f"lora_accuracy_{arm}", scores[-1], "", ">=")
        yield Figure(f"lora_entropy_{arm}", finite_mean(entropies), "nats", ">=")
        stages = run.column("noise/stage")
        for stage in np.unique(stages[np.isfinite(stages)]):
            mean = finite_mean(entropies[stages == stage])
            yield Figure(f"lora_entropy_stage{stage:.0f}_{arm}", mean, "nats", ">=")
        yield Figure(f"lora_gap_{arm}", summary["abs_gap_mean"], "nats", "<=")
        if np.isfinite(peaks := run.column("memory/device_peak_bytes")).any():
            yield Figure(f"lora_run_step_s_{arm}", float(np.median(run.column("timing/step_s"))), "s", "<=")
            yield Figure(f"lora_run_peak_gib_{arm}", float(np.nanmax(peaks)) / GIB, "GiB", "<=")


def main() -> None:
    """Read the run directories, append rows, print them."""
    parser = parser_of(__doc__, "lora")
    parser.add_argument("folder", type=Path, help="the arms' run directories, named like its config")
    parser.add_argument(
        "--full-parameter",
        metavar="PREFIX",
        help="what rows of full-parameter runs in real_model.json, beside the file appended to, begin with: "
        "real_<model>_<data>",
    )
    parser.add_argument("--figure", type=Path, help="PNG of all runs of this config that were kept")
    arguments = parser.parse_args()
    runs, config, results = whole_runs(arguments.folder), arguments.folder.resolve().name, arguments.record.parent
    record_runs(arguments.record, figures(runs), runs, config)
    recorded = read_results(results / "real_model.json") if arguments.full_parameter else []
    gaps = {row.name: row.value for row in recorded}
    for ratio, row in gap_ratios(runs, gaps, arguments.full_parameter):
        command = f"qarl train examples/configs/{config}.yaml" + (f"  # over {row}" if row else "")
        record_runs(arguments.record, [ratio], runs, config, command)
    means = seed_means(read_results(arguments.record), _AVERAGED)
    record_runs(arguments.record, new_figures(arguments.record, means), runs, config)
    keep_runs(runs, results / "runs" / config)
    if arguments.figure:
        write_summary_figure(kept(results / "runs" / config), arguments.figure, variant="noise")


if __name__ == "__main__":
    main()
