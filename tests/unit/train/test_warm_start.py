"""The supervised warm start: what its loss counts, that it teaches, and when it stops."""

import pytest
import torch

from qarl_nemo.data.config import DatasetsData
from qarl_nemo.train.config import TokenizerConfig, WarmStart
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.tasks import TaskSource
from qarl_nemo.train.warm_start import greedy_answers, warm_start
from support.engines import TOKENIZER, tiny_model, weights_of
from support.files import write_jsonl

# answers and prompts of different lengths, so that padding matters
ENCODE = PromptEncoder(TOKENIZER, TokenizerConfig())
PROBLEMS = [("1+1=", "2"), ("12*12=", "144"), ("7=", "7"), ("90+10=", "100")]


@pytest.fixture
def source(tmp_path):
    path = write_jsonl(tmp_path / "problems.jsonl", ({"problem": p, "answer": a} for p, a in PROBLEMS))
    return TaskSource(DatasetsData(source="datasets", train={"data_path": path}), seed=0)


def run(model, source, *, reward=lambda: 0.0, **settings):
    losses = []
    config = WarmStart(**{"batch_size": 4, "lr": 3e-3} | settings)
    warm_start(model, ENCODE, source, config, lambda step, loss: losses.append((step, loss)), reward)
    return losses


@torch.no_grad()
def loss_by_hand(model, *, stop=True, prompt_too=False) -> float:
    """-log p of each answer's tokens and its stop token, one problem at a time, no padding; mean over tokens."""
    total, count = 0.0, 0
    for problem, answer in PROBLEMS:
        prompt, target = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in (problem, answer))
        ids = [*prompt, *target, *([TOKENIZER.eos_token_id] if stop else [])]
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for column in range(1 if prompt_too else len(prompt), len(ids)):
            total, count = total - float(logprobs[column - 1, ids[column]]), count + 1
    return total / count


def test_the_loss_is_the_mean_over_answer_and_stop_tokens(source):
    model = tiny_model()
    expected, unstopped, with_prompts = (
        loss_by_hand(model),
        loss_by_hand(model, stop=False),
        loss_by_hand(model, prompt_too=True),
    )
    ((_, loss),) = run(model, source, steps=1)
    assert loss == pytest.approx(expected, abs=1e-4)
    assert loss != pytest.approx(unstopped, abs=1e-2)
    assert loss != pytest.approx(with_prompts, abs=1e-2)


def test_it_teaches_the_answers_and_where_they_end(source):
    model = tiny_model()
    tasks = source.validation(4)
    assert greedy_answers(model, ENCODE, tasks, 5) != [task.answer for task in tasks]
    losses = run(model, source, steps=60)
    assert losses[-1][1] < 0.1 < losses[0][1]
    assert [step for step, _ in losses] == list(range(1, 61))
    assert greedy_answers(model, ENCODE, tasks, 5) == [task.answer for task in tasks]


def test_greedy_answers_do_not_depend_on_batch_mates(source):
    model = tiny_model()
    run(model, source, steps=15)
    tasks = source.validation(4)
    assert len(set(map(len, ENCODE(tasks)))) > 1
    alone = [greedy_answers(model, ENCODE, [task], 4)[0] for task in tasks]
    assert greedy_answers(model, ENCODE, tasks, 4) == alone


def test_it_stops_at_the_first_look_that_reaches_the_target(source):
    looks = iter([0.1, 0.5, 0.9])
    losses = run(tiny_model(), source, steps=60, target_reward=0.5, check_period=3, reward=lambda: next(looks))
    assert len(losses) == 6
    assert next(looks) == 0.9


def test_without_a_target_it_never_looks(source):
    def refuse():
        raise AssertionError("it looked")

    assert len(run(tiny_model(), source, steps=4, check_period=1, reward=refuse)) == 4


def test_no_steps_change_nothing(source):
    model = tiny_model()
    before = weights_of(model)
    assert run(model, source, steps=0) == []
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


def test_a_bf16_model_learns_from_updates_below_its_resolution(source):
    # weights near 0.1 lie 2^-12 = 2.4e-4 apart in BF16: without FP32 masters steps of 2e-5 leave the loss above 2.6
    losses = [run(tiny_model(dtype=dtype), source, steps=40, lr=2e-5) for dtype in (torch.float32, torch.bfloat16)]
    assert losses[1][-1][1] == pytest.approx(losses[0][-1][1], abs=0.3)
    assert losses[1][-1][1] < 1.5
