"""Asks every model every benchmark and counts the right answers."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from qarl_nemo.config.problems import attempt
from qarl_nemo.data.benchmarks import BENCHMARKS, GROUPS
from qarl_nemo.measure.eval.evaluation import Asked, ModelEvaluation
from qarl_nemo.measure.eval.scores import average, avg_at_k, pass_at_k, reported_ks
from qarl_nemo.measure.eval.settings import EvalJob
from qarl_nemo.measure.eval.store import AnswerStore, Row
from qarl_nemo.metrics.estimate import Estimate
from qarl_nemo.train.template_options import require_options

# Called with what is under way, and how many new answers came: none when it begins.
Show = Callable[[str, int], None]
# Called after each benchmark with all results so far.
Keep = Callable[[list[Row]], None]


def plan(job: EvalJob, store: AnswerStore) -> list[ModelEvaluation]:
    """Encode every prompt for every model, so that what cannot be asked is found before anything is.

    Raises:
        ValueError: tokenizers cannot be used, prompts leave no room for an answer, or no template reads an option; all
            are listed.
    """
    problems: list[str] = []
    found = [attempt(problems, ModelEvaluation, job, model, store) for model in job.models]
    evaluations = [one for one in found if one is not None]
    if not problems and job.settings.prompts is not None:
        attempt(problems, require_options, [one.encoder for one in evaluations])
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} problem(s) with this evaluation:", *problems]))
    return evaluations


def run(evaluations: Sequence[ModelEvaluation], show: Show, keep: Keep) -> list[Row]:
    """Ask one model after another.

    Args:
        evaluations: what `plan` returned.
        show: called as answers come.
        keep: called as results come.

    Returns:
        One row for each model and benchmark, see `score`.
    """
    rows: list[Row] = []
    for evaluation in evaluations:
        try:
            for asked in evaluation.asked:
                doing = f"{evaluation.model.label}: {asked.benchmark.name}"
                show(doing, 0)
                answers = evaluation.answers(asked, functools.partial(show, doing))
                rows.append({"model": evaluation.model.label, **score(asked, answers)})
                keep(rows)
        finally:
            evaluation.close()
    return rows


def score(asked: Asked, answers: Sequence[Row]) -> Row:
    """Return one model's result on one benchmark.

    Args:
        asked: the benchmark; a problem whose prompt is too long counts as answered wrongly.
        answers: all of them.

    Returns:
        How it was sampled, with `shortened_from`, the tokens of an answer where the longest prompt left room for fewer,
        `avg` (avg@k), `pass_at` (pass@k by k), each with its standard error, and the answers' mean
        length and share that was cut off.
    """
    benchmark, problems = asked.benchmark, asked.questions.problems
    right = Counter(row["problem"] for row in answers if row["right"])
    num_right, k = [right[index] for index in problems], benchmark.num_samples
    return {
        "benchmark": benchmark.name,
        "num_problems": len(problems),
        "num_total": asked.questions.num_total,
        "num_overlong": len(problems) - len(asked.prompts),
        "num_samples": k,
        **asdict(asked.params),
        "shortened_from": benchmark.max_new_tokens if asked.params.max_new_tokens < benchmark.max_new_tokens else None,
        "avg": asdict(avg_at_k(num_right, k)),
        "pass_at": {str(one): asdict(pass_at_k(num_right, k, one)) for one in reported_ks(k)},
        "mean_tokens": sum(row["num_tokens"] for row in answers) / len(answers),
        "truncated": sum(row["truncated"] for row in answers) / len(answers),
    }


def averages(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the paper's averages, for models that have answered all benchmarks of one.

    Returns:
        `model`, `group`, `value` and `standard_error` of each.
    """
    found = []
    for group in GROUPS:
        members = {name for name, benchmark in BENCHMARKS.items() if benchmark.group == group}
        for model in dict.fromkeys(row["model"] for row in rows):
            own = [row for row in rows if row["model"] == model and row["benchmark"] in members]
            if len(own) == len(members):
                mean = average([Estimate(**row["avg"]) for row in own])
                found.append({"model": model, "group": group, **asdict(mean)})
    return found
