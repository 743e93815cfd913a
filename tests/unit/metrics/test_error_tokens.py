import math

import pytest
import torch

from qarl_nemo.metrics.error_tokens import error_token_mask, error_token_rates

LIKELY, RARE = math.log(0.5), math.log(5e-4)


def logprobs(rare_at, length):
    values = torch.full((1, length), LIKELY)
    values[0, list(rare_at)] = RARE
    return values


def distinct(length):
    return torch.arange(length)[None]


def test_garbled_means_improbable_under_both_policies():
    # token 1 is rare under both, token 2 only for the learner, token 3 only for the rollout engine
    mask = error_token_mask(logprobs([1, 2], 5), logprobs([1, 3], 5), distinct(5), torch.ones(1, 5))
    assert mask.tolist() == [[False, True, False, False, False]]


def test_threshold_is_a_probability():
    # 5e-4 is below 1e-3 and not below 4e-4
    same = logprobs([1], 3), logprobs([1], 3), distinct(3), torch.ones(1, 3)
    assert error_token_mask(*same, max_prob=1e-3).sum() == 1
    assert error_token_mask(*same, max_prob=4e-4).sum() == 0


def repetitions(tokens, **settings):
    ids = torch.tensor([tokens])
    valid = torch.ones_like(ids)
    likely = torch.full(ids.shape, LIKELY)
    return error_token_mask(likely, likely, ids, valid, **settings)[0].int().tolist()


def test_repeated_ngram_is_marked_from_its_first_copy_to_its_last():
    # 7, then (1 2) three times, then 8: six tokens in a row of period 2
    marked = repetitions([7, 1, 2, 1, 2, 1, 2, 8], min_repeats=3, min_run_tokens=6)
    assert marked == [0, 1, 1, 1, 1, 1, 1, 0]


def test_one_copy_fewer_is_no_repetition():
    assert sum(repetitions([7, 1, 2, 1, 2, 8, 9, 6], min_repeats=3, min_run_tokens=4)) == 0


def test_short_runs_are_honest_repetitions():
    # five zeros, as in 100000: enough copies, too few tokens
    assert sum(repetitions([1, 0, 0, 0, 0, 0], min_repeats=4, min_run_tokens=6)) == 0
    assert repetitions([1, 0, 0, 0, 0, 0], min_repeats=4, min_run_tokens=5) == [0, 1, 1, 1, 1, 1]


def test_longer_units_than_max_ngram_are_not_looked_for():
    tokens = [1, 2, 3] * 4
    assert sum(repetitions(tokens, max_ngram=2, min_repeats=3, min_run_tokens=6)) == 0
    assert sum(repetitions(tokens, max_ngram=3, min_repeats=3, min_run_tokens=6)) == 12


def test_defaults_leave_ordinary_text_alone_and_find_loops():
    assert sum(repetitions([*range(30), 5, 5, 5, *range(30, 60)])) == 0
    assert sum(repetitions([9, 8] + [1, 2, 3, 4] * 4)) == 16


def test_masked_tokens_are_never_errors_and_break_repetitions():
    ids = torch.zeros(1, 8, dtype=torch.long)
    valid = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1]])
    rare = torch.full((1, 8), RARE)
    assert error_token_mask(rare, rare, distinct(8), valid).tolist() == valid.bool().tolist()
    likely = torch.full((1, 8), LIKELY)
    marked = error_token_mask(likely, likely, ids, valid, min_repeats=2, min_run_tokens=4)
    assert marked.int().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]


def slow_repetitions(tokens, max_ngram, min_repeats, min_run):
    marked = [0] * len(tokens)
    for ngram in range(1, max_ngram + 1):
        for start in range(len(tokens)):
            end = start + ngram
            while end < len(tokens) and tokens[end] == tokens[end - ngram]:
                end += 1
            if end - start >= max(ngram * min_repeats, min_run):
                marked[start:end] = [1] * (end - start)
    return marked


def test_agrees_with_a_plain_search_on_random_text():
    generator = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(100):
        tokens = torch.randint(0, 2, (24,), generator=generator).tolist()
        expected = slow_repetitions(tokens, 4, 3, 6)
        assert repetitions(tokens, max_ngram=4, min_repeats=3, min_run_tokens=6) == expected
        found += sum(expected)
    assert found > 0


def test_rates_by_advantage_sign():
    # row 0 (A > 0): 1 error of 4; row 1 (A < 0): 2 of 2 valid; row 2 (A = 0): 0 of 4
    errors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    advantages = torch.tensor([[0.5], [-1.0], [0.0]]).expand(3, 4)
    rates = error_token_rates(errors, valid, advantages)
    expected = {"error_tokens/rate": 0.3, "error_tokens/rate_positive": 0.25, "error_tokens/rate_negative": 1.0}
    assert rates == pytest.approx(expected)
    assert error_token_rates(errors, valid, -advantages) != pytest.approx(expected)


def test_rate_of_a_sign_nobody_has_is_not_a_number():
    rates = error_token_rates(torch.zeros(1, 2).bool(), torch.ones(1, 2), torch.ones(1, 2))
    assert rates["error_tokens/rate_positive"] == 0
    assert math.isnan(rates["error_tokens/rate_negative"])
