"""How `qarl eval` judges the answers that came together."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl_nemo import verify
from qarl_nemo.measure.eval.engine import Answer
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


@pytest.mark.usefixtures("two_processes")
def test_processes_judge_answers_and_each_keeps_its_place(tmp_path):
    model = save_sparse(tmp_path / "model", TOKENIZER, num_hidden_layers=1, num_experts=4, max_position_embeddings=256)
    problems = [{"question": f"{number}+0=", "answer": f"#### {number}"} for number in range(6)]
    data = Path(write_jsonl(tmp_path / "gsm8k.jsonl", problems))
    asked = EvalSettings((model,), ("gsm8k",), tmp_path / "r.json", {"gsm8k": data}, device="cpu", batch_size=4)
    (evaluation,) = plan(prepare(asked), AnswerStore(tmp_path / "answers.jsonl", {}))
    said = iter(rf"It is \boxed{{{number}}}" for number in (0, 9, 2, 9, 9, 5))
    evaluation.engine = SimpleNamespace(answer=lambda prompts, *_: [Answer(next(said), 1, False) for _ in prompts])
    rows = evaluation.answers(evaluation.asked[0], lambda _: None)
    assert [row["problem"] for row in rows] == list(range(6))
    assert [row["right"] for row in rows] == [True, False, True, False, False, True]
