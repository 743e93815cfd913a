"""What `qarl eval` asks an engine: which prompts, for how long answers, with which seeds; and when all is there."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl_nemo.measure.eval.engine import Answer
from qarl_nemo.measure.eval.evaluation import ModelEvaluation
from qarl_nemo.measure.eval.output import write_results
from qarl_nemo.measure.eval.run import plan
from qarl_nemo.measure.eval.settings import EvalSettings, prepare
from qarl_nemo.measure.eval.store import AnswerStore
from qarl_nemo.train.sampling import SamplingParams
from support.engines import TOKENIZER
from support.files import write_jsonl
from support.whole_models import save_sparse

CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("asking") / "model"
    return save_sparse(folder, TOKENIZER, num_hidden_layers=1, num_experts=4, max_position_embeddings=CONTEXT)


def planned(folder: Path, model: Path, questions: list[str], **options) -> ModelEvaluation:
    """One model that is asked these questions and nothing around them, a token a letter."""
    (folder / "bare.txt").write_text("{}")
    data = Path(write_jsonl(folder / "gsm8k.jsonl", [{"question": one, "answer": "#### 2"} for one in questions]))
    options |= {"prompt_file": folder / "bare.txt", "device": "cpu"}
    asked = EvalSettings((model,), ("gsm8k",), folder / "r.json", {"gsm8k": data}, **options)
    (evaluation,) = plan(prepare(asked), AnswerStore(folder / "answers.jsonl", {}))
    return evaluation


def test_the_longest_prompt_decides_how_long_answers_may_be(model, tmp_path):
    (asked,) = planned(tmp_path, model, ["1+" * 50, "1+1="], temperature=0.5, top_p=0.9).asked
    assert asked.params == SamplingParams(CONTEXT - 100, temperature=0.5, top_p=0.9)


def test_a_prompt_that_leaves_room_for_one_token_is_asked(model, tmp_path):
    (asked,) = planned(tmp_path, model, ["1+" * 127 + "1", "1+" * 128]).asked
    assert (list(asked.prompts), asked.params.max_new_tokens) == ([0], 1)


def test_every_answer_has_a_seed_of_its_own(model, tmp_path):
    evaluation, seeds = planned(tmp_path, model, ["1+1=", "2+0="], num_samples=3), []

    def answer(prompts: list[list[int]], _: SamplingParams, given: list[int]) -> list[Answer]:
        seeds.extend(given)
        return [Answer("2", 1, False) for _ in prompts]

    evaluation.engine = SimpleNamespace(answer=answer)
    evaluation.answers(evaluation.asked[0], lambda _: None)
    assert len(seeds) == len(set(seeds)) == 6


def test_results_are_complete_with_every_benchmark_of_every_model(model, tmp_path):
    sums = Path(write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "1+1=", "answer": "#### 2"}]))
    maths = Path(write_jsonl(tmp_path / "math500.jsonl", [{"problem": "1+1=", "answer": "2"}]))
    data = {"gsm8k": sums, "math500": maths}
    job = prepare(EvalSettings((model,), tuple(data), tmp_path / "r.json", data, device="cpu"))
    rows = [{"model": str(model), "benchmark": name} for name in data]
    for count in range(3):
        write_results(job, rows[:count])
        assert json.loads((tmp_path / "r.json").read_text())["complete"] == (count == 2)
