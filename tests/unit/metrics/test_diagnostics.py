import math

import numpy as np
import pytest
import torch

from qarl_nemo.metrics.diagnostics import DiagnosticsCollector, diagnostic_steps, make_example, read_diagnostics


def sequences(values, valid):
    values = torch.tensor(values)
    return {
        "prox_ratio": values,
        "mismatch_weight": values + 1,
        "advantage": -values,
        "kept": values > 1,
        "valid": torch.tensor(valid),
    }


def tokens(values, mask):
    values = torch.tensor(values)
    return {
        "prev_logprobs": values,
        "curr_logprobs": values - 1,
        "generation_logprobs": values - 2,
        "advantages": -values,
        "token_mask": torch.tensor(mask),
        "error_mask": values < -5.5,
    }


def test_valid_sequences_and_tokens_of_all_micro_batches_are_written(tmp_path):
    collector = DiagnosticsCollector(step=7)
    collector.add(sequences([1.0, 2.0], [True, True]), **tokens([[-1.0, -2.0], [-3.0, -4.0]], [[1, 1], [1, 0]]))
    collector.add(sequences([3.0, 4.0], [True, False]), **tokens([[-5.0, -6.0], [-7.0, -8.0]], [[0, 1], [1, 1]]))
    collector.write(tmp_path)
    assert diagnostic_steps(tmp_path) == [7]
    arrays = read_diagnostics(tmp_path, 7).arrays
    assert arrays["seq_prox_ratio"].tolist() == [1, 2, 3]
    assert arrays["seq_mismatch_weight"].tolist() == [2, 3, 4]
    assert arrays["seq_advantage"].tolist() == [-1, -2, -3]
    assert arrays["seq_kept"].tolist() == [False, True, True]
    # -4 and -5 are masked; -7 and -8 belong to an invalid sequence
    prev = arrays["token_prev_logprob"]
    assert sorted(prev.tolist()) == [-6, -3, -2, -1]
    assert (arrays["token_curr_logprob"] == prev - 1).all()
    assert (arrays["token_generation_logprob"] == prev - 2).all()
    assert (arrays["token_advantage"] == -prev).all()
    # -6 is the first token of its response, behind a prompt of one
    assert arrays["position_tokens"].tolist() == [3, 1]
    assert arrays["position_error_tokens"].tolist() == [1, 0]


def test_positions_count_as_far_as_the_longest_response(tmp_path):
    collector = DiagnosticsCollector(step=1)
    for values in ([[-1.0, -9.0]], [[-9.0, -1.0, -9.0, -9.0]], [[-1.0]]):
        collector.add(sequences([1.0], [True]), **tokens(values, np.ones_like(values)))
    collector.write(tmp_path)
    arrays = read_diagnostics(tmp_path, 1).arrays
    assert arrays["position_tokens"].tolist() == [3, 2, 1, 1]
    assert arrays["position_error_tokens"].tolist() == [1, 1, 1, 1]


def collect_range(step, num_batches, batch_tokens, max_tokens):
    collector = DiagnosticsCollector(step, max_tokens)
    for batch in range(num_batches):
        values = np.arange(batch * batch_tokens, (batch + 1) * batch_tokens, dtype=np.float32)[None]
        collector.add(sequences([1.0], [True]), **tokens(values, np.ones_like(values)))
    return collector


def test_the_token_sample_is_bounded_uniform_and_repeatable(tmp_path):
    for name in ("first", "again"):
        collect_range(step=3, num_batches=20, batch_tokens=100, max_tokens=500).write(tmp_path / name)
    sample = read_diagnostics(tmp_path / "first", 3).arrays["token_prev_logprob"]
    assert len(sample) == len(set(sample.tolist())) == 500
    # 500 of 0 .. 1999: the sample mean's deviation is 577 / sqrt(500) * sqrt(1 - 500 / 2000) = 22, four of them are 90
    assert abs(sample.mean() - 999.5) < 90
    assert abs(np.arange(500).mean() - 999.5) > 90
    assert (read_diagnostics(tmp_path / "again", 3).arrays["token_prev_logprob"] == sample).all()


def test_a_step_without_sequences_is_written_empty(tmp_path):
    DiagnosticsCollector(step=1).write(tmp_path)
    arrays = read_diagnostics(tmp_path, 1).arrays
    assert {array.shape for array in arrays.values()} == {(0,)}


def test_an_example_tells_where_its_error_tokens_stand(tmp_path):
    example = make_example(
        prompt="1+1=",
        tokens=["2", "##", " ok", "##"],
        answer="2",
        reward=1,
        advantage=-0.5,
        error_mask=[False, True, False, True],
        prev_logprobs=[0.0, math.log(0.25), 0.0, float("-inf")],
        generation_logprobs=torch.tensor([0.0, 0.0, 0.0, float("nan")]),
    )
    assert example == {
        "prompt": "1+1=",
        "response": "2## ok##",
        "answer": "2",
        "reward": 1.0,
        "advantage": -0.5,
        "error_tokens": [
            {"text": "##", "start": 1, "prev_prob": pytest.approx(0.25), "generation_prob": 1.0},
            {"text": "##", "start": 6, "prev_prob": 0.0, "generation_prob": None},
        ],
    }
    DiagnosticsCollector(step=2).write(tmp_path, [example])
    assert read_diagnostics(tmp_path, 2).examples == [example]
