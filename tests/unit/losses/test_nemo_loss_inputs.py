"""What NeMo-RL hands to our loss beside a plain batch: filtered log-probabilities, lines of its own, fractions."""

import math

import pytest
import torch

from qarl_nemo.losses.nonfinite import first_nonfinite
from support.nemo_batches import Replaced, counts, make_batch, make_loss


def run(loss_fn, curr, data):
    return loss_fn(next_token_logprobs=curr[:, :-1], data=data, **counts(data))


def test_the_reference_kl_is_of_the_whole_vocabulary_where_log_probabilities_are_filtered():
    curr, data = make_batch()
    loss_fn = make_loss(replaced=Replaced(reference_policy_kl_penalty=0.1))
    whole = (curr.detach() - 0.3).requires_grad_()
    filtered = run(loss_fn, curr, data)[1]["kl_penalty"]
    expected = run(loss_fn, whole, data)[1]["kl_penalty"]
    loss, metrics = run(loss_fn, curr, data | {"curr_logprobs_unfiltered": whole[:, :-1]})
    assert metrics["kl_penalty"] == pytest.approx(expected)
    assert metrics["kl_penalty"] != pytest.approx(filtered, rel=0.1)
    loss.backward()
    assert whole.grad.any()


def test_the_clamped_ratio_has_a_line_of_its_own_on_either_side():
    curr, data = make_batch()
    # Ratios are from exp(-0.02) to exp(0.02), outside of both.
    metrics = run(make_loss(replaced=Replaced(ratio_clip_min=0.004, ratio_clip_max=0.013)), curr, data)[1]
    extremes = [metrics[f"probs_ratio_clamped_{name}"] for name in ("min", "max")]
    assert extremes == pytest.approx([1 - 0.004, 1 + 0.013], abs=1e-6)


def test_responses_that_count_in_part_are_counted_in_part():
    curr, data = make_batch()
    data["sample_mask"] = torch.tensor([0.5, 1.0, 0.25, 0.0, 2.0, 0.125, 1.0, 0.75])
    assert run(make_loss(), curr, data)[1]["num_valid_samples"] == 5.625


def test_of_two_numbers_of_a_token_that_are_not_finite_the_one_of_the_learner_is_named():
    values = {name: torch.zeros(2, 3) for name in ("curr_logprobs", "prev_logprobs", "advantages")}
    for name in ("advantages", "prev_logprobs"):
        values[name][1, 2] = math.inf
    found = first_nonfinite(values, torch.ones(2, 3, dtype=torch.bool), torch.arange(2))
    assert str(found) == "response 1, response token 2: prev_logprobs is inf"


def test_a_loss_that_overflows_is_noticed_though_no_number_did():
    curr, data = make_batch()
    data["advantages"] = torch.full_like(data["advantages"], 3e38)
    loss_fn = make_loss("grpo_tis")
    assert math.isinf(run(loss_fn, curr.detach(), data)[0])
    assert loss_fn.nonfinite == [None]
