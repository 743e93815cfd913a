r"""Turn the arms of a comparison on a real model into rows: reward, accuracy, gap and error tokens of every run.

    qarl train examples/configs/local_gsm8k_arms.yaml --parallel 3
    python tools/record/real_model_runs.py runs/local_gsm8k_arms --model qwen2.5-coder-0.5b --data gsm8k \
        --figure docs/images/real_gsm8k.png
    python tools/record/real_model_runs.py runs/local_math_arms --model qwen2.5-coder-1.5b --data math

`test_accuracy` is that of a run's first validation set; others have rows of their own (`math_500_accuracy`). Seeds may
come one after the other: `recovery.py` reads all rows in the file, and the figure is drawn from all that were kept.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kept_runs import keep_runs, kept
from paired_answers import answer_differences
from recovery import recoveries, remove_withdrawn
from rows import new_figures, parser_of, slug
from sampled_tokens import token_figures, write_token_scatter

from qarl_nemo.files import read_json
from qarl_nemo.metrics.diagnostics import diagnostic_steps, read_diagnostics
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.metrics.report import write_summary_figure
from qarl_nemo.metrics.results import Figure, read_results, record_figures
from qarl_nemo.metrics.runs import Run, load_run
from qarl_nemo.metrics.summary import finite_mean, smoothing_window, summarize_run

_CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
# What moves before rewards do: how far the engine is from the learner, the gradient, the learner's own entropy, the
# share of responses that the objective keeps, and what of the served policy a step changes.
_DRIFT = {"kl": ("mismatch/kl_k3", "nats"), "grad_norm": ("optim/grad_norm", ""), "entropy": ("loss/entropy", "nats"),
          "kept": ("loss/kept_fraction", "fraction"), "flipped_codes": ("refit/flipped_codes", "fraction"),
          "flipped_scales": ("refit/flipped_scales", "fraction")}  # fmt: skip


def run_figures(run: Run, prefix: str, accuracies: Sequence[float] | None = None) -> list[Figure]:
    """Return a run's figures; `first` and `final` are means of ten steps.

    Args:
        run: the run.
        prefix: begins the names, `real_<model>_<data>`.
        accuracies: on the test set, the first and the last of which are recorded; None = the run's own validations,
            of which a run that was cut before its last one has the first alone.
    """
    name, summary = f"{prefix}_{slug(run.setting('run.arm'))}_seed{run.seed}", summarize_run(run)
    tests = {"test": accuracies} if accuracies else scores_of(run)
    last_tests = tests if accuracies or tested_at_its_end(run) else {}
    return [
        Figure(f"{name}_steps", summary["num_steps"], "", ">="),
        Figure(f"{name}_reward_first", summary["reward_first"], "", ">="),
        Figure(f"{name}_reward_final", summary["reward_final"], "", ">="),
        *(Figure(f"{name}_{test}_accuracy_first", scores[0], "", ">=") for test, scores in tests.items() if scores),
        *(Figure(f"{name}_{test}_accuracy", scores[-1], "", ">=") for test, scores in last_tests.items() if scores),
        Figure(f"{name}_gap", summary["abs_gap_mean"], "nats", "<="),
        Figure(f"{name}_error_tokens", summary["error_token_rate"], "fraction", "<="),
        *drift_figures(run, name),
        *token_figures(run, name),
    ]


def tested_at_its_end(run: Run) -> bool:
    """Tell whether a run's last step has a validation, so that its last score is that of its last weights."""
    return all(np.isfinite(run.column(column)[-1]) for column in run.score_columns().values())


def drift_figures(run: Run, name: str) -> Iterable[Figure]:
    """Yield the means of the first and the last steps of what drifts, as far as the run measured it."""
    window = smoothing_window(len(run.steps))
    for kind, (column, unit) in _DRIFT.items():
        values = run.column(column)
        for when, part in (("first", values[:window]), ("final", values[-window:])):
            if np.isfinite(mean := finite_mean(part)):
                yield Figure(f"{name}_{kind}_{when}", mean, unit, "<=")


def whole_runs(folder: Path, num_steps: int | None = None) -> list[Run]:
    """Return the runs of a folder of arms that did all of their steps, and print which did not.

    Args:
        folder: holds their run directories.
        num_steps: as many steps of each are read, and are enough; None = all that its config asks for.

    Raises:
        SystemExit: a config does not say how many steps, as those kept in docs/results do not.
    """
    whole = []
    for run in (load_run(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))):
        wanted = num_steps or run.setting("grpo.max_num_steps")
        if wanted is None:
            raise SystemExit(f"{run.path}: its config has no grpo.max_num_steps, as a run's own has; set --steps")
        if len(run.steps) >= wanted:
            whole.append(_first_steps(run, wanted))
        else:
            print(f"{run.name}: left out, {len(run.steps)} of {wanted} steps")
    return whole


def _runs_beside(folder: Path, num_steps: int | None) -> list[Run]:
    if not any(folder.glob("*/validation/*.jsonl")):
        raise SystemExit(f"--beside {folder}: none of its runs kept its answers, so there is nothing to pair with")
    return whole_runs(folder, num_steps)


def _first_steps(run: Run, num_steps: int) -> Run:
    columns = {name: values[:num_steps] for name, values in run.columns.items()}
    diagnosed = [step for step in diagnostic_steps(run.path) if step <= num_steps]
    diagnostics = read_diagnostics(run.path, diagnosed[-1]) if diagnosed else None
    return replace(run, steps=run.steps[:num_steps], columns=columns, diagnostics=diagnostics)


def record_runs(
    path: Path, figures: Iterable[Figure], runs: list[Run], config: str, command: str | None = None
) -> None:
    """Append the figures of runs, with what computed them.

    Args:
        path: file of docs/results.
        figures: what the runs gave.
        runs: the runs, at least one.
        config: the name of their config.
        command: what measures them again; None = `qarl train` with that config.

    Raises:
        SystemExit: there is no such config, so that no command is known.
    """
    if command is None:
        if not (_CONFIGS / f"{config}.yaml").is_file():
            raise SystemExit(f"no config is called {config}.yaml: name the folder like its config, or set --command")
        command = f"qarl train examples/configs/{config}.yaml"
    record_figures(path, figures, command=command, **ran_on(runs))


def ran_on(runs: list[Run]) -> dict[str, Any]:
    """Return the hardware and versions of runs.

    Returns:
        `hardware` and `versions`.

    Raises:
        SystemExit: the runs ran on different machines or versions.
        FileError: one does not say on which.
    """
    found = {run.name: read_json(run.path / FACTS_FILE, "what a run ran on") for run in runs}
    distinct = {json.dumps(facts, sort_keys=True) for facts in found.values()}
    if len(distinct) != 1:
        told = "; ".join(f"{name}: {facts}" for name, facts in found.items()) or "none did all of its steps"
        raise SystemExit(f"runs of one machine and one set of versions are recorded at a time; {told}")
    return json.loads(distinct.pop())


def scores_of(run: Run) -> dict[str, list[float]]:
    """Return the scores of a run's validations; its first set is `test`, others have their own names."""
    (_, first), *others = run.score_columns().items()
    names = {first: "test"} | {column: slug(name) for name, column in others}
    scores = {name: run.column(column) for column, name in names.items()}
    return {name: values[np.isfinite(values)].tolist() for name, values in scores.items()}


def main() -> None:
    """Read the run directories, append rows, print them."""
    parser = parser_of(__doc__, "real_model")
    parser.add_argument("folder", type=Path, help="holds the arms' run directories, named like its config")
    parser.add_argument("--model", required=True, help="for the rows' names, e.g. qwen2.5-coder-0.5b")
    parser.add_argument("--data", required=True, help="for the rows' names, e.g. gsm8k")
    parser.add_argument(
        "--command", help="what trains them, unless qarl train does with the config of the folder's name"
    )
    parser.add_argument("--steps", type=int, help="of each run, the rest of which is left out; all, unless set")
    parser.add_argument(
        "--over", metavar="ARM", help="whose answers all arms' stand against; rollout-only's, unless set"
    )
    parser.add_argument("--beside", type=Path, help="holds arms recorded before, on any machine, to pair answers with")
    parser.add_argument("--figure", type=Path, help="PNG of all runs of this config that were kept")
    parser.add_argument("--scatter", type=Path, help="PNG of these runs' tokens, by engine and by learner")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: set 1 or more")
    whole, config = whole_runs(arguments.folder, arguments.steps), arguments.folder.resolve().name
    prefix = f"real_{arguments.model}_{arguments.data}"
    answered = whole + (_runs_beside(arguments.beside, arguments.steps) if arguments.beside else [])
    if arguments.over and arguments.over not in (arms := sorted({run.arm for run in answered})):
        parser.error(f"--over {arguments.over!r}: no such arm among {', '.join(arms) or 'none'}")
    differences = answer_differences(answered, prefix, arguments.over)
    figures = [one for run in whole for one in run_figures(run, prefix)]
    record_runs(arguments.record, figures, whole, config, arguments.command)
    record_runs(arguments.record, new_figures(arguments.record, differences), whole, config, arguments.command)
    values = {row.name: row.value for row in read_results(arguments.record)}
    computed = recoveries(values, prefix)
    remove_withdrawn(arguments.record, computed, prefix)
    record_runs(arguments.record, new_figures(arguments.record, computed), whole, config, arguments.command)
    folder = arguments.record.parent / "runs" / config
    keep_runs(whole, folder)
    if arguments.figure:
        write_summary_figure(kept(folder), arguments.figure)
    if arguments.scatter:
        write_token_scatter(whole, arguments.scatter)


if __name__ == "__main__":
    main()
