"""Drawing one token: temperature, top-p, and that the reported logprob is the untruncated distribution's."""

import math

import pytest
import torch

from qarl_nemo.train.sampling import SamplingParams, draw

PROBABILITIES = [0.1, 0.5, 0.05, 0.35]
LOGITS = torch.tensor(PROBABILITIES).log() + 3.0  # logits are known up to a constant


def frequencies(params):
    num = 20_000
    tokens, logprobs = draw(LOGITS.expand(num, 4), params, torch.Generator().manual_seed(0))
    by_token = {int(token): float(logprob) for token, logprob in zip(tokens, logprobs, strict=True)}
    return (torch.bincount(tokens, minlength=4) / num).tolist(), by_token


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [
        (1.0, 1.0, PROBABILITIES),
        # the smallest set that holds the mass: .5 is enough for 0.4, .5 + .35 for 0.6, .95 for 0.9
        (1.0, 0.4, [0, 1, 0, 0]),
        (1.0, 0.6, [0, 0.5 / 0.85, 0, 0.35 / 0.85]),
        (1.0, 0.9, [0.1 / 0.95, 0.5 / 0.95, 0, 0.35 / 0.95]),
        # T = 1/2 squares the odds: .01, .25, .0025, .1225 of .385
        (0.5, 1.0, [0.01 / 0.385, 0.25 / 0.385, 0.0025 / 0.385, 0.1225 / 0.385]),
        # truncation comes after temperature: .25/.385 = .649 alone already holds 0.6
        (0.5, 0.6, [0, 1, 0, 0]),
    ],
)
def test_tokens_follow_the_truncated_distribution(temperature, top_p, expected):
    found, _ = frequencies(SamplingParams(1, temperature, top_p))
    # the standard error of a frequency is at most sqrt(.25 / 20000) = .0035
    assert found == pytest.approx(expected, abs=0.014)
    assert [frequency == 0 for frequency in found] == [value == 0 for value in expected]


def test_the_tolerance_tells_a_truncation_before_temperature():
    found, _ = frequencies(SamplingParams(1, 0.5, 0.6))
    assert found != pytest.approx([0, 0.25 / 0.3725, 0, 0.1225 / 0.3725], abs=0.014)


def test_logprobs_are_those_of_the_untruncated_distribution_at_the_temperature():
    _, logprobs = frequencies(SamplingParams(1, 0.5, 0.7))
    # kept: 1 and 3; renormalizing over them would give log(.25/.3725) = -.399 for token 1
    assert logprobs == {1: pytest.approx(math.log(0.25 / 0.385)), 3: pytest.approx(math.log(0.1225 / 0.385))}


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one():
    tokens, logprobs = draw(LOGITS[None], SamplingParams(1, 0.0, 0.1), torch.Generator())
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(math.log(0.5))


def test_rows_are_drawn_apart():
    logits = torch.full((3, 4), -50.0)
    logits[0, 2] = logits[1, 0] = logits[2, 3] = 50.0
    assert draw(logits, SamplingParams(1, 1.0, 0.9), torch.Generator())[0].tolist() == [2, 0, 3]
