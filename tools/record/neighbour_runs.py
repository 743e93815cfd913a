"""Turn comparisons with the paper's neighbours into rows: reward, accuracy, gap and flipped codes of every run.

    qarl train examples/configs/local_gsm8k_qurl.yaml --parallel 3
    python tools/record/neighbour_runs.py runs/local_gsm8k_qurl
    python tools/record/neighbour_runs.py runs/local_nested --figure docs/images/nested.png

A row is `<comparison>_<arm>_seed<seed>_<figure>`, shares of codes that flip in a step `flips_<comparison>_<arm>_...`;
without a seed it ends in `_mean` or `_error` and is over all seeds in the file.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from kept_runs import keep_runs, kept
from real_model_runs import record_runs, run_figures, whole_runs
from rows import new_figures, parser_of, seed_means, slug

from qarl_nemo.metrics.report import write_summary_figure
from qarl_nemo.metrics.results import Figure, read_results
from qarl_nemo.metrics.runs import Run

# Config -> what its rows begin with.
COMPARISONS = {
    "local_gsm8k_qurl": "qurl",
    "local_progressive": "progressive",
    "local_nested": "nested",
    "local_qurl": "small_qurl",
    "local_noise": "small_noise",
    "local_gsm8k_progressive": "progressive_gsm8k",
}
FLIPS = ("codes", "codes_in", "codes_out")


def figures(runs: list[Run], comparison: str) -> Iterator[Figure]:
    """Yield the figures of every run.

    Yields:
        `run_figures`, the mean reward of all steps, what a step costs, tests on the way, each stage's gap where there
        is a schedule, and mean shares of flipped codes, each stage's as well, where there are codes.
    """
    for run in runs:
        name = f"{comparison}_{slug(run.setting('run.arm'))}_seed{run.seed}"
        yield from run_figures(run, comparison)
        yield Figure(f"{name}_reward_mean", float(np.mean(run.column("reward/mean"))), "", ">=")
        grids, gaps = run.column("refit/grid_bits"), run.column("mismatch/abs_gap_mean")
        for figure, unit, value in _cost(run):
            if np.isfinite(value):
                yield Figure(f"{name}_{figure}", value, unit, "<=")
        scores = run.column("validation/reward")
        for step, score in list(zip(run.steps, scores, strict=True))[1:-1]:
            if np.isfinite(score):
                yield Figure(f"{name}_test_accuracy_step{step:.0f}", float(score), "", ">=")
        stages = {f"{bits:.0f}_bits": grids == bits for bits in np.unique(grids[np.isfinite(grids)])}
        for stage, steps in stages.items():
            yield Figure(f"{name}_gap_{stage}", float(np.mean(gaps[steps])), "nats", "<=")
        for kind in FLIPS:
            shares = run.column(f"refit/flipped_{kind}")
            if np.isfinite(shares).any():
                yield Figure(f"flips_{name}_{kind}", float(np.nanmean(shares)), "fraction", ">=")
                for stage, steps in stages.items():
                    yield Figure(f"flips_{name}_{kind}_{stage}", float(np.nanmean(shares[steps])), "fraction", ">=")


def _cost(run: Run) -> Iterator[tuple[str, str, float]]:
    yield "step_s", "s", float(np.median(run.column("timing/step_s")))
    # NaN where there is no GPU, or no weight to cap.
    yield "peak_gib", "GiB", float(np.max(run.column("memory/device_peak_bytes"))) / 2**30
    yield "capped", "fraction", float(np.mean(run.column("loss/mismatch_capped_fraction")))


def main() -> None:
    """Read the run directories, append rows, print them."""
    parser = parser_of(__doc__, "neighbours")
    parser.add_argument("folder", type=Path, help=f"the arms' run directories: runs/{{{','.join(COMPARISONS)}}}")
    parser.add_argument("--figure", type=Path, help="PNG of these runs, or of all runs of this config that are kept")
    arguments = parser.parse_args()
    config = arguments.folder.name
    if config not in COMPARISONS:
        parser.error(f"{arguments.folder} is none of {', '.join(COMPARISONS)}: a folder is named like its config")
    runs, comparison = whole_runs(arguments.folder), COMPARISONS[config]
    record_runs(arguments.record, figures(runs, comparison), runs, config)
    means = seed_means(read_results(arguments.record), rf"(?:flips_)?{comparison}_(?!gsm8k)\w+(?<!_steps)")
    record_runs(arguments.record, new_figures(arguments.record, means), runs, config)
    drawn = [run.path for run in runs]
    if "gsm8k" in config:
        # Days of a GPU; the small ones are made again in an hour.
        folder = arguments.record.parent / "runs" / config
        keep_runs(runs, folder)
        drawn = kept(folder)
    if arguments.figure:
        write_summary_figure(drawn, arguments.figure)


if __name__ == "__main__":
    main()
