"""Benchmarks: every set's own format is read, answers are checked as each set asks, and names lead to records."""

import json
import re
from pathlib import Path

import pytest

from qarl_nemo import answer_text, verify
from qarl_nemo.data.benchmark_problems import (
    are_right,
    benchmark_tasks,
    checker,
    is_right,
    read_problems,
)
from qarl_nemo.data.benchmarks import BENCHMARKS, find_benchmarks, with_prompt
from qarl_nemo.data.config import BenchmarkConfig
from qarl_nemo.files import FileError
from support.files import write_jsonl

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "after_training.md"
# Made-up problems, in the fields of each set.
OLYMPIAD = {
    "id": 1,
    "question": "Which?",
    "solution": ["s"],
    "context": None,
    "is_multiple_answer": False,
    "unit": None,
}
ARC = {"id": "a", "question": "What is wet?", "choices": {"text": ["sand", "water"], "label": ["A", "B"]}}
GPQA = {"Question": "Which is even?", "Correct Answer": "4", "Subdomain": "numbers"} | {
    f"Incorrect Answer {number}": str(wrong) for number, wrong in enumerate((1, 3, 5), start=1)
}
RECORDS = {
    "aime24": ({"id": 60, "problem": "What is 2+2?", "solution": "It is 4.", "answer": "004", "year": "2024"}, "004"),
    "aime25": ({"question": "What is 2+3?", "answer": "5"}, "5"),
    "amc23": ({"id": 0, "question": "What is 9*3?", "answer": 27.0, "url": "none"}, "27"),
    "math500": ({"problem": "Half of 3?", "solution": "s", "answer": r"\frac{3}{2}", "level": 1}, r"\frac{3}{2}"),
    "minerva": ({"question": "How many?", "answer": "1.5e3"}, r"1.5 \times 10^{3}"),
    "olympiadbench": (OLYMPIAD | {"final_answer": ["$1$", "$3$"]}, "1, 3"),
    "arc_c": (ARC | {"answerKey": "B"}, "B"),
    "gpqa": (GPQA, None),
    "mmlu_pro": ({"question": "Third?", "options": ["x", "y", "z"], "answer": "C", "answer_index": 2}, "C"),
    "gsm8k": ({"question": "3 and 4?", "answer": "It is <<3+4=7>>7.\n#### 1,007"}, "1007"),
}


def write(path, records):
    if path.suffix == ".jsonl":
        write_jsonl(path, records)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        import datasets

        datasets.Dataset.from_list(records).to_parquet(path)
    return path


def test_every_benchmark_of_the_table_has_a_made_up_record():
    assert set(RECORDS) == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_each_set_is_read_in_its_own_fields(name, suffix, tmp_path):
    record, answer = RECORDS[name]
    (problem,) = read_problems(BENCHMARKS[name], write(tmp_path / f"local{suffix}", [record]))
    question = record.get("question") or record.get("problem") or record["Question"]
    assert problem.question.startswith(question)
    assert answer in (None, problem.answer)


def test_options_stand_below_the_question_and_the_right_one_keeps_its_letter(tmp_path):
    arc = write(tmp_path / "arc.jsonl", [ARC | {"answerKey": "B"}])
    (problem,) = read_problems(BENCHMARKS["arc_c"], arc)
    assert problem.question == "What is wet?\n\nA. sand\nB. water"
    # Some records of ARC number their options.
    digits = ARC | {"choices": {"text": ["sand", "water"], "label": ["1", "2"]}, "answerKey": "2"}
    assert read_problems(BENCHMARKS["arc_c"], write(tmp_path / "digits.jsonl", [digits])) == [problem]
    listed = [{"text": "sand", "label": "A"}, {"text": "water", "label": "B"}]
    own = {"id": "a", "question": {"stem": "What is wet?", "choices": listed}, "answerKey": "B"}
    assert read_problems(BENCHMARKS["arc_c"], write(tmp_path / "ai2.jsonl", [own])) == [problem]
    rows = ARC | {"choices": listed, "answerKey": "B"}
    assert read_problems(BENCHMARKS["arc_c"], write(tmp_path / "rows.jsonl", [rows])) == [problem]


def test_the_options_of_gpqa_are_shuffled_alike_for_every_model(tmp_path):
    records = [GPQA | {"Question": f"Which is even, number {n}?"} for n in range(40)]
    path = write(tmp_path / "gpqa.jsonl", records)
    problems = read_problems(BENCHMARKS["gpqa"], path)
    assert read_problems(BENCHMARKS["gpqa"], path) == problems
    assert {problem.answer for problem in problems} == set("ABCD")
    assert all(f"{problem.answer}. 4" in problem.question for problem in problems)


def test_the_question_of_olympiadbench_comes_after_its_context(tmp_path):
    path = write(tmp_path / "o.jsonl", [OLYMPIAD | {"context": "Let n be 3.", "final_answer": ["3"]}])
    assert read_problems(BENCHMARKS["olympiadbench"], path)[0].question == "Let n be 3.\n\nWhich?"


def test_minerva_is_read_as_first_published_too(tmp_path):
    record = {"problem": "How many?", "solution": r"Two and two: \boxed{4} \mathrm{~m}.", "type": "sums", "idx": 0}
    (problem,) = read_problems(BENCHMARKS["minerva"], write(tmp_path / "minerva.jsonl", [record]))
    assert (problem.question, problem.answer) == ("How many?", "4")


def test_a_small_number_of_minerva_keeps_the_sign_of_its_exponent(tmp_path):
    record = {"question": "How long?", "answer": "2.5E-03"}
    (problem,) = read_problems(BENCHMARKS["minerva"], write(tmp_path / "minerva.jsonl", [record]))
    assert problem.answer == r"2.5 \times 10^{-3}"


def test_each_of_several_answers_may_end_with_a_full_stop(tmp_path):
    record = OLYMPIAD | {"final_answer": ["$1$.", "$3$."]}
    (problem,) = read_problems(BENCHMARKS["olympiadbench"], write(tmp_path / "o.jsonl", [record]))
    assert problem.answer == "1, 3"


@pytest.mark.parametrize(
    ("stored", "response"),
    [
        ("$3,$5$", r"\boxed{3, 5}"),
        (r"$(-\infty, 2) \cup\{3\}$.", r"\boxed{(-\infty, 2) \cup \{3\}}"),
        (r"a x+$ $\dot{b} y", r"\boxed{a x + \dot{b} y}"),
        ("-2", r"\boxed{-2}"),
    ],
)
def test_answers_are_one_formula_whatever_dollar_signs_stand_in_them(stored, response, tmp_path):
    for name, record in (
        ("olympiadbench", OLYMPIAD | {"final_answer": [stored]}),
        ("minerva", {"question": "Which?", "answer": stored}),
    ):
        (problem,) = read_problems(BENCHMARKS[name], write(tmp_path / f"{name}.jsonl", [record]))
        assert is_right(BENCHMARKS[name], response, problem.answer)
        for wrong in (r"\boxed{3}", r"\boxed{0}"):
            assert not is_right(BENCHMARKS[name], wrong, problem.answer)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("math500", {"answer": None}, "answer is 'None'"),
        ("aime25", {"answer": " "}, "answer is empty"),
        ("aime25", {"question": ""}, "question is empty"),
        ("gsm8k", {"answer": "It is 7."}, "####"),
        ("arc_c", {"answerKey": "E"}, "answerKey is 'E'; legal: A, B"),
        ("arc_c", {"choices": "sand"}, "choices is 'sand', not lists of label and text"),
        ("arc_c", {"choices": {"text": "sand", "label": ["A"]}}, "text is 'sand', not a list of texts"),
        ("arc_c", {"choices": {"text": ["sand"], "label": ["A", "B"]}}, "2 label and 1 text, not as many of both"),
        ("mmlu_pro", {"answer": "D"}, "answer is 'D'; legal: A, B, C"),
        ("mmlu_pro", {"answer": "BC"}, "answer is 'BC'; legal: A, B, C"),
        ("mmlu_pro", {"answer": "second"}, "answer is 'second'; legal: A, B, C"),
        ("mmlu_pro", {"options": "xyz"}, "options is 'xyz', not a list of texts"),
        ("mmlu_pro", {"options": ["x", None]}, "options is \"['x', None]\", not a list of texts"),
        ("mmlu_pro", {"options": ["x"] * 27}, "there are 27 options, and letters for 26"),
        ("olympiadbench", {"final_answer": "3"}, "not a list of texts"),
    ],
)
def test_records_of_another_kind_are_all_named(name, change, expected, tmp_path):
    record = RECORDS[name][0]
    path = write(tmp_path / "bad.jsonl", [record, record | change, {"foreign": 1}, {"foreign": 2}])
    with pytest.raises(FileError) as error:
        read_problems(BENCHMARKS[name], path)
    assert f"{name}: {path} is not {BENCHMARKS[name].title}" in str(error.value)
    assert re.search(f"line 2: .*{re.escape(expected)}", str(error.value))
    assert "line 3, line 4: no field '" in str(error.value)
    assert "(its fields: foreign)" in str(error.value)


def test_a_benchmark_is_a_validation_set_in_its_own_words(tmp_path):
    path = str(write(tmp_path / "one.jsonl", [RECORDS["math500"][0]]))
    (task,) = benchmark_tasks(BenchmarkConfig(benchmark="math500", data_path=path))
    assert task.prompt == BENCHMARKS["math500"].ask("Half of 3?")
    assert (task.answer, task.reward_function) == (r"\frac{3}{2}", None)
    other = BenchmarkConfig(benchmark="math500", data_path=path, prompt_template="Q: {problem}", system_prompt="Think.")
    (task,) = benchmark_tasks(other)
    assert [message["content"] for message in task.prompt] == ["Think.", "Q: Half of 3?"]


def test_a_validation_set_of_letters_is_checked_by_letter(tmp_path):
    path = str(write(tmp_path / "one.jsonl", [ARC | {"answerKey": "B"}]))
    (task,) = benchmark_tasks(BenchmarkConfig(benchmark="arc_c", data_path=path))
    # Of which math-verify finds the first alone.
    responses = (r"So \boxed{B}.", "The answer is (B).", "The answer is A.", "water")
    assert [task.reward(response) for response in responses] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("has_readme", [True, False])
def test_a_copy_of_the_hubs_repository_has_the_benchmarks_subsets(has_readme, tmp_path):
    subsets = BENCHMARKS["aime25"].subsets
    for answer, subset in enumerate((*subsets, "AIME2025-III")):
        (tmp_path / subset).mkdir()
        write(tmp_path / subset / "test-0.jsonl", [RECORDS["aime25"][0] | {"answer": str(answer)}])
    configs = [{"config_name": subset, "data_dir": subset} for subset in subsets]
    if has_readme:
        (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    assert [problem.answer for problem in read_problems(BENCHMARKS["aime25"], tmp_path)] == ["0", "1"]
    # One subset's folder, and one with the split's file, hold nothing else.
    assert [problem.answer for problem in read_problems(BENCHMARKS["aime25"], tmp_path / subsets[1])] == ["1"]
    write(tmp_path / "AIME2025-III" / "test.jsonl", [RECORDS["aime25"][0]])
    assert [problem.answer for problem in read_problems(BENCHMARKS["aime25"], tmp_path / "AIME2025-III")] == ["5"]


def test_a_copy_that_lacks_one_of_several_parts_is_refused_and_no_other_part_asked_twice(tmp_path):
    first, second = BENCHMARKS["aime25"].subsets
    (tmp_path / first).mkdir()
    write(tmp_path / first / "test.jsonl", RECORDS["aime25"])
    with pytest.raises(FileError, match=rf"the copy is not whole: add {second}; with `qarl eval`"):
        read_problems(BENCHMARKS["aime25"], tmp_path)


def test_a_missing_copy_says_how_one_is_named(tmp_path):
    with pytest.raises(FileError, match=r"gsm8k: .*does not exist; with `qarl eval`, --data gsm8k=PATH names a copy"):
        read_problems(BENCHMARKS["gsm8k"], tmp_path / "none.jsonl")


@pytest.mark.parametrize("module", [verify, answer_text])
def test_a_change_of_what_judges_answers_makes_another_checker(module, tmp_path, monkeypatch):
    changed = tmp_path / "changed.py"
    changed.write_text(Path(module.__file__).read_text() + "\n")
    before = checker.__wrapped__()
    monkeypatch.setattr(module, "__file__", str(changed))
    assert checker.__wrapped__() != before


def test_answers_are_checked_as_each_set_asks():
    assert is_right(BENCHMARKS["amc23"], r"It is \boxed{27}", "27")
    assert not is_right(BENCHMARKS["amc23"], r"It is \boxed{28}", "27")
    assert is_right(BENCHMARKS["minerva"], r"\boxed{1500}", r"1.5 \times 10^{3}")
    assert is_right(BENCHMARKS["olympiadbench"], r"\boxed{3, 1}", "1, 3")
    assert is_right(BENCHMARKS["gpqa"], r"\boxed{B}", "B")
    # Several letters choose none, of which one is right anyhow.
    assert not is_right(BENCHMARKS["gpqa"], r"\boxed{B, C}", "B")
    assert are_right(BENCHMARKS["amc23"], [r"\boxed{27}", r"\boxed{28}"], ["27", "27"]) == [True, False]
    assert are_right(BENCHMARKS["gpqa"], [r"\boxed{C}", r"\boxed{B}"], ["B", "B"]) == [False, True]


def test_sampling_is_the_papers():
    for benchmark in BENCHMARKS.values():
        assert (benchmark.temperature, benchmark.top_p) == (0.6, 1.0)
        assert (benchmark.max_prompt_tokens, benchmark.max_new_tokens) == (2048, 16_384)
        assert benchmark.num_samples == (32 if benchmark.num_problems <= 40 else 1)


def test_names_lead_to_records():
    assert [one.name for one in find_benchmarks(["gsm8k", "MATH500"])] == ["gsm8k", "math500"]
    assert [one.name for one in find_benchmarks(["ood"])] == ["arc_c", "gpqa", "mmlu_pro"]
    assert len(find_benchmarks(["math"])) == 6
    assert len(find_benchmarks(["all"])) == len(BENCHMARKS)
    assert [one.name for one in find_benchmarks(["MATH-500", "ARC-c", "MMLU-Pro"])] == ["math500", "arc_c", "mmlu_pro"]


def test_all_names_that_cannot_be_asked_are_named():
    with pytest.raises(ValueError, match="benchmark") as error:
        find_benchmarks(["gsm8k", "gsm", "LiveCodeBench", "gsm8k"])
    for expected in (
        "unknown benchmark 'gsm'",
        "LiveCodeBench is not supported: its answers are programs",
        "named more than once: gsm8k",
        "legal: aime24,",
    ):
        assert expected in str(error.value)
    with pytest.raises(ValueError, match="no benchmark is named"):
        find_benchmarks([])


def test_prompts_ask_for_a_box_and_can_be_those_of_training():
    gsm8k = BENCHMARKS["gsm8k"]
    assert gsm8k.ask("3 {and} 4?").startswith("3 {and} 4?\n\n")
    assert gsm8k.ask("").endswith(r"\boxed{}.")
    asked = with_prompt(gsm8k, "Answer in \\boxed{{}}:\n{}\n").ask("{x}?")
    assert asked == "Answer in \\boxed{}:\n{x}?\n"
    for wrong in ("no place", "{} and {}", "{name}", "{", "{[set]} {}", "{.x} {}"):
        with pytest.raises(ValueError, match=r"a prompt's template has one {} for the question, and braces doubled"):
            with_prompt(gsm8k, wrong)
    with pytest.raises(ValueError, match=r"this one has 2 places in single braces$"):
        with_prompt(gsm8k, "{} and {}")


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda one: one.name)
def test_the_guide_lists_each_benchmark_as_its_record_has_it(benchmark):
    (line,) = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{benchmark.name}` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1].split(",")[0] == benchmark.hub_path
    assert [int(cell) for cell in cells[2:4]] == [benchmark.num_problems, benchmark.num_samples]
    assert cells[4] == {"math": "math-verify", "letter": "letter"}[benchmark.check]
