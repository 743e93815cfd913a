"""How `qarl eval` judges the answers that came together."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl_nemo import verify
from qarl_nemo.measure.eval import evaluation as evaluation_module
from qarl_nemo.measure.eval.engine import Answer
from qarl_nemo.measure.eval.output import left_out, write_results
from qarl_nemo.measure.eval.run import plan
from qarl_nemo.measure.eval.settings import EvalSettings, prepare
from qarl_nemo.measure.eval.store import AnswerStore
from support.engines import TOKENIZER
from support.files import write_jsonl
from support.whole_models import save_sparse


@pytest.fixture
def two_processes(monkeypatch):
    """Answers of any length are shared out to two processes, and none is parsed in this one."""
    monkeypatch.setattr(verify, "_WORTH_SHARING", 1)
    monkeypatch.setattr(verify, "_MOST_PROCESSES", 2)
    monkeypatch.setattr(verify, "_verified", None)
    verify._workers.cache_clear()
    yield
    verify._workers.cache_clear()


def evaluation(folder, answers):
    """One model that is asked six sums, and gives these answers where it is asked."""
    model = folder / "model"
    if not model.exists():
        save_sparse(model, TOKENIZER, num_hidden_layers=1, num_experts=4, max_position_embeddings=256)
    problems = [{"question": f"{number}+0=", "answer": f"#### {number}"} for number in range(6)]
    data = Path(write_jsonl(folder / "gsm8k.jsonl", problems))
    asked = EvalSettings((model,), ("gsm8k",), folder / "r.json", {"gsm8k": data}, device="cpu", batch_size=4)
    (made,) = plan(prepare(asked), AnswerStore(folder / "answers.jsonl", {}))
    said = iter(rf"It is \boxed{{{number}}}" for number in answers)
    made.engine = SimpleNamespace(answer=lambda prompts, *_: [Answer(next(said), 1, False) for _ in prompts])
    return made


def rows_of(made):
    return made.answers(made.asked[0], lambda _: None)


@pytest.mark.usefixtures("two_processes")
def test_processes_judge_answers_and_each_keeps_its_place(tmp_path):
    rows = rows_of(evaluation(tmp_path, (0, 9, 2, 9, 9, 5)))
    assert [row["problem"] for row in rows] == list(range(6))
    assert [row["right"] for row in rows] == [True, False, True, False, False, True]


def test_what_another_checker_judged_is_judged_anew_and_asked_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_module, "are_right", lambda _, responses, __: [True] * len(responses))
    monkeypatch.setattr(evaluation_module, "checker", lambda: "that takes everything")
    assert all(row["right"] for row in rows_of(evaluation(tmp_path, (0, 9, 2, 9, 9, 5))))
    monkeypatch.undo()
    again = evaluation(tmp_path, ())
    assert [row["right"] for row in rows_of(again)] == [True, False, True, False, False, True]
    assert again.num_differently == 3
    # Once.
    third = evaluation(tmp_path, ())
    monkeypatch.setattr(evaluation_module, "are_right", None)
    assert [row["right"] for row in rows_of(third)] == [True, False, True, False, False, True]
    assert third.num_differently == 0


def test_results_that_a_command_does_not_ask_again_are_named_before_they_go(tmp_path):
    made = evaluation(tmp_path, (0, 1, 2, 3, 4, 5))
    assert left_out(made.job) == []
    write_results(made.job, [])
    assert left_out(made.job) == []
    output = tmp_path / "r.json"
    row = {"model": made.model.label, "benchmark": "gsm8k"}
    earlier = [row, row | {"model": "another"}, row | {"benchmark": "math500"}]
    output.write_text(json.dumps(json.loads(output.read_text()) | {"results": earlier}))
    assert left_out(made.job) == ["another on gsm8k", f"{made.model.label} on math500"]
