"""What `qarl eval` prints of its figures, and how its copies of data are named."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from qarl_nemo.cli.evaluate import named_copies
from qarl_nemo.measure.eval.output import answers_path, notes, results_table
from qarl_nemo.measure.eval.run import averages


def test_averages_need_all_of_their_benchmarks():
    names = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench", "gsm8k")
    shared = {
        "num_samples": 1,
        "num_problems": 1,
        "num_total": 1,
        "pass_at": {},
        "truncated": 0,
        "num_overlong": 0,
        "shortened_from": None,
    }
    rows = [
        {"model": "a", "benchmark": name, "avg": {"value": 0.1 * place, "standard_error": 0.1}, **shared}
        for place, name in enumerate(names)
    ]
    (mean,) = averages(rows)
    # (0 + 0.1 + ... + 0.5) / 6 = 0.25, sqrt(6) * 0.1 / 6
    assert (mean["group"], mean["value"]) == ("math", pytest.approx(0.25))
    assert mean["standard_error"] == pytest.approx(0.1 / 6**0.5)
    assert averages(rows[1:]) == []
    assert results_table(rows).row_count == 8


def test_the_table_shows_the_mean_and_pass_at_the_number_of_answers():
    pass_at = {k: {"value": value, "standard_error": 0.01} for k, value in (("1", 0.2), ("2", 0.4), ("4", 0.7))}
    row = {"model": "m", "benchmark": "gsm8k", "num_samples": 4, "pass_at": pass_at}
    console = Console(width=80, file=io.StringIO())
    console.print(results_table([row | {"avg": {"value": 0.3, "standard_error": 0.02}}]))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines[-2:] == ["GSM8K, avg@4 30.0 (2.0)", "pass@4 70.0 (1.0)"]


def test_a_sample_is_noted_and_a_whole_set_is_not():
    row = {"model": "m", "benchmark": "math500", "num_total": 500, "truncated": 0, "num_overlong": 0}
    row |= {"shortened_from": None}
    assert list(notes([row | {"num_problems": 500}])) == []
    assert list(notes([row | {"num_problems": 50}])) == ["math500: a sample of 50 of 500 problems"]


def test_long_names_are_told_apart_in_a_narrow_table():
    names = [f"/models/of/some/long/folder/step_{number}" for number in range(6)]
    row = {"benchmark": "gsm8k", "num_samples": 1, "avg": {"value": 0.5, "standard_error": 0.01}}
    console = Console(width=80, file=io.StringIO())
    console.print(results_table([row | {"model": name} for name in names]))
    (names_end,) = [line for line in console.file.getvalue().splitlines() if line.startswith("benchmark")]
    assert [cell[-1] for cell in names_end.split()[1:]] == list("012345")


def test_names_with_brackets_are_told_apart():
    row = {"benchmark": "gsm8k", "num_samples": 1, "avg": {"value": 0.5, "standard_error": 0.01}}
    console = Console(width=80, file=io.StringIO())
    console.print(results_table([row | {"model": name} for name in ("m[a]", "m[b]", "m[/c]")]))
    assert "benchmark" in console.file.getvalue()
    assert all(f" {name} " in console.file.getvalue() for name in ("m[a]", "m[b]", "m[/c]"))


def test_results_with_dots_in_their_names_have_answers_of_their_own():
    assert answers_path(Path("out/results.json")) == Path("out/results.answers.jsonl")
    names = ("Llama-3.1-8B", "Llama-3.2-8B", "Llama-3.1-8B.json.old")
    assert [answers_path(Path(name)).name for name in names] == [f"{name}.answers.jsonl" for name in names]


def test_a_copy_is_named_once():
    for given, said in (
        (["a=1", "b=2", "a=3"], "more than one copy of a"),
        (["a=1", "b", "=c"], "--data b, =c: write"),
    ):
        with pytest.raises(ValueError, match=said):
            named_copies(given)
    assert named_copies(["a=1=2", "b=3"]) == {"a": Path("1=2"), "b": Path("3")}
