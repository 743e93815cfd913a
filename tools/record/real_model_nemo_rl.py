r"""Turn a NeMo-RL run of an arm on a real model into rows with the names of the embedded engine's.

    python tools/record/real_model_nemo_rl.py logs/qarl-qwen2.5-coder-0.5b-1n2g-megatron-w4a16 \
        --arm "QaRL w4a16, Megatron" --evaluation runs/megatron/eval.json --model qwen2.5-coder-0.5b --data gsm8k

NeMo-RL samples validation as it samples training, where the embedded engine's tests are greedy. So accuracies come from
`qarl eval --temperature 0 --num-samples 1`, asked the model before training and the one after it, in this order.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from real_model_runs import run_figures
from rows import parser_of, slug

from qarl_nemo.config import read_yaml
from qarl_nemo.data.benchmarks import BENCHMARKS
from qarl_nemo.files import FileError, read_json
from qarl_nemo.metrics.nemo_rl_logs import find_config, read_facts
from qarl_nemo.metrics.results import Figure, record_figures
from qarl_nemo.metrics.runs import Run, load_run


def whole_run(folder: Path, arm: str) -> tuple[Run, int]:
    """Read a run that did all of its steps.

    Args:
        folder: NeMo-RL's log folder.
        arm: what the run is called.

    Returns:
        The run, and the longest answer of its rollouts, tokens.

    Raises:
        ValueError: it is not such a folder, or steps are missing.
    """
    file = find_config(folder)
    if file is None:
        raise ValueError(f"{folder}: no log folder of a run that examples/run_qarl_grpo.py started")
    settings: Any = read_yaml(file)
    run, steps = load_run(folder), settings["grpo"]["max_num_steps"]
    if len(run.steps) != steps:
        raise ValueError(f"{folder}: {len(run.steps)} of {steps} steps; start the run again, and it goes on")
    named = replace(run, config=run.config | {"run": {"arm": arm}})
    return named, settings["policy"]["generation"]["max_new_tokens"]


def greedy_accuracies(file: Path, max_new_tokens: int) -> list[float]:
    """Read the accuracies before and after training.

    Args:
        file: results of `qarl eval`.
        max_new_tokens: the answers' greatest length.

    Raises:
        ValueError: they are not of two models on one whole benchmark, greedy, with answers of that length.
    """
    rows = read_json(file, "results of qarl eval", dict).get("results", [])
    if len(rows) != 2 or rows[0]["benchmark"] != rows[1]["benchmark"]:
        asked = ", ".join(f"{row['benchmark']} of {row['model']}" for row in rows) or "nothing"
        raise FileError(f"{file} has {asked}; it takes one benchmark of two models, before and after training")
    wanted = {"num_problems": BENCHMARKS[rows[0]["benchmark"]].num_problems, "temperature": 0.0}
    wanted |= {"max_new_tokens": max_new_tokens}
    wrong = [
        f"{row['model']}: {key}={row[key]}, here {value}"
        for row in rows
        for key, value in wanted.items()
        if row[key] != value
    ]
    if wrong:
        raise FileError(f"{file} is not comparable with the embedded engine's tests: {'; '.join(wrong)}")
    return [row["avg"]["value"] for row in rows]


def _times(run: Run, name: str, facts: dict[str, Any]) -> Iterator[Figure]:
    # The first step compiles.
    yield Figure(f"{name}_step_s", float(np.median(run.column("timing/step_s")[1:])), "s", "<=")
    if "start_s" in facts:
        yield Figure(f"{name}_start_s", facts["start_s"], "s", "<=")


def main() -> None:
    """Read the log folder and the evaluation, append rows, print them."""
    parser = parser_of(__doc__, "real_model")
    parser.add_argument("folder", type=Path, help="NeMo-RL's log folder")
    parser.add_argument("--arm", required=True, help="for the rows' names, e.g. 'QaRL w4a16, Megatron'")
    parser.add_argument("--evaluation", type=Path, required=True, help="results of qarl eval, before and after")
    parser.add_argument("--model", required=True, help="for the rows' names, e.g. qwen2.5-coder-0.5b")
    parser.add_argument("--data", required=True, help="for the rows' names, e.g. gsm8k")
    parser.add_argument("--command", help="what measures it again, where run.json's has paths of its own")
    arguments = parser.parse_args()
    try:
        run, longest = whole_run(arguments.folder, arguments.arm)
        accuracies, facts = greedy_accuracies(arguments.evaluation, longest), read_facts(arguments.folder)
    except ValueError as error:
        parser.error(str(error))
    facts |= {"command": arguments.command} if arguments.command else {}
    ran_on = {key: facts[key] for key in ("hardware", "versions", "command")}
    prefix = f"real_{arguments.model}_{arguments.data}"
    figures = [
        *run_figures(run, prefix, accuracies),
        *_times(run, f"{prefix}_{slug(arguments.arm)}_seed{run.seed}", facts),
    ]
    record_figures(arguments.record, figures, **ran_on)


if __name__ == "__main__":
    main()
