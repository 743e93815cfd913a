"""Turn an evaluation on real benchmark files into rows: how many of each set's own answers its checker accepts.

    qarl eval model --benchmarks gsm8k,minerva --data gsm8k=gsm8k.jsonl --data minerva=minerva.jsonl --limit 30 \
        --output runs/eval/real.json
    python tools/record/real_benchmarks.py runs/eval/real.json

A model answers a sample, so this walks over the whole files that it was asked from, without the model. `_seen` is the
share of problems whose own answer, in a box, is right; `_refused` that of those where the next other answer is wrong.
Two texts of one number, 5 and x=5, are rightly not told apart.
"""

from collections.abc import Sequence
from pathlib import Path

from rows import parser_of

from qarl_nemo.data.benchmark_fields import Problem
from qarl_nemo.data.benchmark_problems import is_right, read_problems
from qarl_nemo.data.benchmarks import BENCHMARKS, Benchmark
from qarl_nemo.files import read_json
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures


def walk(benchmark: Benchmark, problems: Sequence[Problem]) -> list[Figure]:
    """Check every problem's own answer, and another problem's; print what is judged wrongly.

    Args:
        benchmark: its record.
        problems: all of its problems.
    """
    seen = refused = 0
    for index, problem in enumerate(problems):
        others = (one.answer for one in (*problems[index:], *problems[:index]) if one.answer != problem.answer)
        accepted, wrong = is_right(benchmark, _boxed(problem.answer), problem.answer), next(others, None)
        confused = wrong is not None and is_right(benchmark, _boxed(wrong), problem.answer)
        if not accepted:
            print(f"{benchmark.name}, problem {index}: {problem.answer!r} is not accepted")
        if confused:
            print(f"{benchmark.name}, problem {index}: {wrong!r} is taken for {problem.answer!r}")
        seen, refused = seen + accepted, refused + (not confused)
    name = f"eval_{benchmark.name}"
    return [
        Figure(f"{name}_problems", len(problems), "", ">=", benchmark.num_problems),
        Figure(f"{name}_seen", seen / len(problems), "fraction", ">=", 1.0),
        Figure(f"{name}_refused", refused / len(problems), "fraction", ">="),
    ]


def _boxed(answer: str) -> str:
    return f"Therefore the answer is $\\boxed{{{answer}}}$."


def main() -> None:
    """Read the evaluation, walk over its files, append rows."""
    parser = parser_of(__doc__, "real_model")
    parser.add_argument("evaluation", type=Path, help="results of qarl eval")
    arguments = parser.parse_args()
    evaluation = read_json(arguments.evaluation, "results of qarl eval", dict)
    figures = []
    for name in dict.fromkeys(row["benchmark"] for row in evaluation["results"]):
        path = evaluation["settings"]["data"].get(name)
        figures += walk(BENCHMARKS[name], read_problems(BENCHMARKS[name], path and Path(path)))
    command = f"python tools/record/real_benchmarks.py {arguments.evaluation}"
    record_figures(arguments.record, figures, command=command, **facts("cpu", packages=["math-verify"]))


if __name__ == "__main__":
    main()
