"""What a finished step reports: figures by hand, and the responses that are worth reading."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qarl_nemo.metrics.diagnostics import read_diagnostics
from qarl_nemo.train.learner import UpdateResult
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.step_metrics import FinishedStep, token_texts, validation_answers
from support.engines import TOKENIZER

LENGTHS = [1, 3, 2]
MASK = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
NUM_PROMPT_COLUMNS = 2


def finished(*, garbled=(), valid=(True, True, True)) -> FinishedStep:
    """Three responses with logprobs of -0.5, the learner's 0.1 below the engine's; `garbled` ones at -9 and -10."""
    generation, prev = (torch.full(MASK.shape, value) for value in (-0.5, -0.6))
    for place in garbled:
        generation[place], prev[place] = -9.0, -10.0
    prompts = torch.tensor([[False, True], [True, True], [True, True]])
    ids = torch.tensor(TOKENIZER("1+2=3", add_special_tokens=False)["input_ids"]).expand(3, -1).clone()
    rollouts = Rollouts(
        input_ids=ids,
        attention_mask=torch.cat([prompts, MASK], -1),
        response_mask=MASK,
        generation_logprobs=generation * MASK,
        routes=None,
        truncated=torch.tensor([False, True, False]),
        weight_version=1,
    )
    sequences = {
        "prox_ratio": torch.tensor([1.0, 3.0, 100.0]),
        "mismatch_weight": torch.ones(3),
        "advantage": torch.tensor([1.0, -1.0, 0.0]),
        "kept": torch.ones(3, dtype=torch.bool),
        "valid": torch.tensor(valid),
    }
    return FinishedStep(
        tasks=[SimpleNamespace(answer=str(row)) for row in range(3)],
        rollouts=rollouts,
        rewards=torch.tensor([1.0, 0.0, 0.0]),
        prev_logprobs=prev * MASK,
        advantages=torch.tensor([1.0, -1.0, 0.0]),
        result=UpdateResult({"loss/total": 0.25}, sequences, torch.full(MASK.shape, -0.7)),
    )


def test_the_metrics_of_a_step_by_hand():
    metrics = finished().metrics()
    expected = {
        "reward/mean": 1 / 3,
        # with n - 1: (2/3)^2 + 2 (1/3)^2 = 2/3, over 2
        "reward/std": math.sqrt(1 / 3),
        "response_length_tokens/mean": 2.0,
        "truncated_fraction": 1 / 3,
        # -log p of the sampled tokens, of the engine that sampled them
        "rollout/entropy_estimate": 0.5,
        "loss/total": 0.25,
        # a hundredth of the way from the first of three to the last is 0.02 of the way to the second
        "prox_ratio/p01": 1.04,
        "prox_ratio/p50": 3.0,
        "prox_ratio/p99": 98.06,
        "mismatch/abs_gap_mean": 0.1,
        "mismatch/kl_k1": 0.1,
        "error_tokens/rate": 0.0,
    }
    assert {name: pytest.approx(metrics[name], rel=1e-5) for name in expected} == expected


def test_ratios_are_those_of_responses_that_count():
    assert finished(valid=(True, True, False)).metrics()["prox_ratio/p50"] == 2.0


def test_error_tokens_are_told_by_the_sign_of_their_response():
    metrics = finished(garbled=[(1, 0), (1, 2)]).metrics()
    rates = [metrics[f"error_tokens/{name}"] for name in ("rate", "rate_positive", "rate_negative")]
    assert rates == pytest.approx([2 / 6, 0.0, 2 / 3])


def test_tokens_that_a_response_repeats_are_errors_where_it_repeats_them():
    step, logprobs = finished(), torch.full((1, 20), -0.5)
    ids = torch.arange(NUM_PROMPT_COLUMNS + 20)[None].clone()
    ids[:, NUM_PROMPT_COLUMNS : NUM_PROMPT_COLUMNS + 16] = 7
    everything = torch.ones(1, 20, dtype=torch.bool)
    rollouts = replace(step.rollouts, input_ids=ids, response_mask=everything, generation_logprobs=logprobs)
    wrong = replace(step, rollouts=rollouts, prev_logprobs=logprobs).error_mask
    assert wrong[0].tolist() == [True] * 16 + [False] * 4


def test_the_responses_with_the_most_error_tokens_are_kept_first(tmp_path):
    finished(garbled=[(1, 0), (2, 0), (2, 1)]).write_diagnostics(tmp_path, 4, TOKENIZER)
    examples = read_diagnostics(tmp_path, 4).examples
    assert [example["answer"] for example in examples] == ["2", "1", "0"]
    assert [len(example["error_tokens"]) for example in examples] == [2, 1, 0]
    assert [example["response"] for example in examples] == ["2=", "2=3", "2"]
    assert [example["prompt"] for example in examples] == ["1+", "1+", "+"]
    assert [(example["reward"], example["advantage"]) for example in examples] == [(0, 0), (0, -1), (1, 1)]
    error = examples[1]["error_tokens"][0]
    assert (error["prev_prob"], error["generation_prob"]) == pytest.approx((math.exp(-10), math.exp(-9)), rel=1e-3)


# As Llama 2 and Mistral decode: a first space is dropped, and bytes that no token has are tokens.
PIECES = [
    "<unk>",
    "</s>",
    "\u2581The",
    "\u2581answer",
    "\u2581",
    "4",
    "2",
    *(f"<0x{byte:02X}>" for byte in "\n\u20ac".encode()),
]


def test_texts_of_tokens_joined_are_the_response():
    model = models.BPE({piece: n for n, piece in enumerate(PIECES)}, [], unk_token="<unk>", byte_fallback=True)
    own = Tokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    own.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", unk_token="<unk>")
    newline, *euro = range(7, len(PIECES))
    tokens = [2, 3, 4, 5, 6, *euro, newline, 2, euro[0]]
    texts = token_texts(tokenizer, tokens)
    assert texts == ["The", " answer", " ", "4", "2", "", "", "\u20ac", "\n", " The", "\ufffd"]
    assert "".join(texts) == tokenizer.decode(tokens)
    assert "".join(tokenizer.decode([token]) for token in tokens) != tokenizer.decode(tokens)


def test_garbage_is_not_decoded_again_for_each_of_its_tokens():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own)
    half, *_ = euro = tokenizer.encode("\u20ac", add_special_tokens=False)
    decoded = []

    class Counting:
        def decode(self, tokens):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens)

    tokens = [*euro, *[half] * 500, *euro, *tokenizer.encode("end")]
    texts = token_texts(Counting(), tokens)
    assert "".join(texts) == tokenizer.decode(tokens) == "\u20ac" + "\ufffd" * 500 + "\u20acend"
    assert max(decoded) < 30


def test_the_sample_of_tokens_tells_the_policies_apart(tmp_path):
    finished().write_diagnostics(tmp_path, 4, TOKENIZER)
    arrays = read_diagnostics(tmp_path, 4).arrays
    for name, logprob in {"prev": -0.6, "curr": -0.7, "generation": -0.5}.items():
        assert arrays[f"token_{name}_logprob"].tolist() == pytest.approx([logprob] * 6)
    assert sorted(arrays["token_advantage"].tolist()) == [-1, -1, -1, 0, 0, 1]


def test_an_answer_of_a_validation_is_kept_with_what_it_answers():
    step = finished()
    tasks = [SimpleNamespace(dataset="sums", prompt=f"{row}+1=", answer=f"{row + 1}") for row in range(3)]
    kept = validation_answers(tasks, step.rollouts, ["1", "4", "no"], [1.0, 0.0, 0.5])
    names = ("dataset", "prompt", "answer", "response", "reward", "num_tokens", "truncated")
    rows = [
        ("sums", "0+1=", "1", "1", 1.0, 1, False),
        ("sums", "1+1=", "2", "4", 0.0, 3, True),
        ("sums", "2+1=", "3", "no", 0.5, 2, False),
    ]
    assert kept == [dict(zip(names, row, strict=True)) for row in rows]
