import dataclasses
import math

import pytest
import torch

from qarl_nemo.losses.ratios import Units, capped_fraction
from support.loss_batches import batch_from_gaps, close, make_loss, run

# One response with A = 2 and one with A = -1, so that each token is one case. log r and log w per token:
# C = 2: weights min(w, 2) are 1, 2 (w = 4) and 0.25 (truncation has no floor) in both responses.
LOG_PROX = [[math.log(1.1), math.log(1.5), math.log(0.5)], [math.log(0.5), math.log(1.5), math.log(4.0)]]
LOG_MISMATCH = [[0.0, math.log(4.0), math.log(0.25)]] * 2
ADVANTAGES = [2.0, -1.0]


def token_batch():
    return batch_from_gaps(LOG_PROX, LOG_MISMATCH, ADVANTAGES)


# Per token: min(w, C) * clipped ratio * A; where the gradient flows it is -that / 6, else 0.
CASES = {
    # clip [.8, 1.28]. A > 0: 1.1 in; 1.5 -> 1.28 out; .5 in.  A < 0: .5 -> .8 out; 1.5 in; 4 in (no upper line).
    "grpo_tis": ([2.2, 5.12, 0.25], [-0.8, -3.0, -1.0], [True, False, True, False, True, True]),
    # The same, but A < 0 stops at c = 3: 4 -> 3 out.
    "dual_clip_grpo": ([2.2, 5.12, 0.25], [-0.8, -3.0, -0.75], [True, False, True, False, True, False]),
    # Negative tokens vanish.
    "positive_grpo": ([2.2, 5.12, 0.25], [0.0, 0.0, 0.0], [True, False, True, False, False, False]),
    # Ratio 1 everywhere.
    "on_policy_grpo": ([2.0, 4.0, 0.5], [-1.0, -2.0, -0.25], [True] * 6),
    # clip [.8, 1.2 * max(1, w/2)]: w = 4 doubles the line to 2.4, so 1.5 is in.
    "qurl_acr": ([2.2, 6.0, 0.25], [-0.8, -3.0, -1.0], [True, True, True, False, True, True]),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_match_numbers_derived_by_hand(name):
    positive, negative, flows = CASES[name]
    output, grad = run(make_loss(name), *token_batch())
    terms = torch.tensor([*positive, *negative], dtype=torch.float64)
    expected_grad = torch.where(torch.tensor(flows), -terms / 6, 0.0)
    assert close(output.loss.item(), -terms.sum() / 6)
    assert close(grad.flatten(), expected_grad)
    assert torch.count_nonzero(grad.flatten()[~torch.tensor(flows)]) == 0
    # The same tolerance refuses another denominator (the mean over tokens that learn) and another objective's numbers.
    assert not close(output.loss.item(), -terms.sum() / max(1, sum(flows) - 1))
    others = [sum(CASES[other][0] + CASES[other][1]) for other in CASES if other != name]
    assert not any(close(output.loss.item(), -total / 6) for total in others)


@pytest.mark.parametrize(
    ("name", "positive", "negative"),
    [
        ("grpo_tis", (2, 0, 1), (2, 1, 0)),
        ("dual_clip_grpo", (2, 0, 1), (1, 1, 1)),
        ("positive_grpo", (2, 0, 1), (0, 0, 0)),
        ("qurl_acr", (3, 0, 0), (2, 1, 0)),
    ],
)
def test_band_metrics_count_tokens(name, positive, negative):
    metrics = make_loss(name)(*token_batch()).metrics
    for sign, counts in (("positive", positive), ("negative", negative)):
        for place, count in zip(("in", "below", "above"), counts, strict=True):
            assert metrics[f"{place}_band_fraction_{sign}"].item() == pytest.approx(count / 6)
        assert metrics[f"num_in_band_{sign}"].item() == counts[0]
        assert metrics[f"fraction_{sign}"].item() == pytest.approx(0.5)
    assert metrics["mismatch_capped_fraction"].item() == pytest.approx(2 / 6)


def test_the_adaptive_line_is_multiplied_by_what_was_truncated():
    # w = 4 and C = 2: the line is 1.2 * 2 = 2.4, and not 1.2 + 1.
    curr, data = batch_from_gaps([[math.log(2.3), math.log(2.5)]], [[math.log(4.0)] * 2], [1.0])
    _, grad = run(make_loss("qurl_acr"), curr, data)
    assert (grad != 0).tolist() == [[True, False]]


def test_a_weight_on_the_cap_is_used_as_it_is():
    log_mismatch = torch.tensor([math.log(2.0), math.log(2.0) + 1e-9], dtype=torch.float64)
    units = Units.of(torch.ones(2), torch.tensor(2.0))
    assert capped_fraction(log_mismatch, 2.0, units)["mismatch_capped_fraction"].item() == 0.5


def test_without_a_cap_the_engines_policy_counts_as_the_learners():
    curr, data = token_batch()
    naive, grad = run(make_loss("grpo_tis", mismatch_cap=None), curr, data)
    agreeing = dataclasses.replace(data, generation_logprobs=data.prev_logprobs)
    expected, expected_grad = run(make_loss("grpo_tis"), curr, agreeing)
    assert torch.equal(naive.loss, expected.loss)
    assert torch.equal(grad, expected_grad)
    assert "mismatch_capped_fraction" not in naive.metrics
    assert not close(run(make_loss("grpo_tis"), curr, data)[0].loss.item(), naive.loss.item())


def test_sapo_matches_numbers_derived_by_hand():
    # tau_pos = 1, tau_neg = 2; f = 4/tau * p with p = sigmoid(tau (r - 1)), df/dlogr = 4 p (1 - p) r
    #   A = 3,  tokens r = 1, 2: p = 1/2, 1/(1+e^-1) = .7310586; f = 2, 2.9242343; mean 2.4621172, * 3 = 7.3863515
    #   A = -1, token  r = 2:    p = 1/(1+e^-2) = .8807971;      f = 1.7615942;                    * -1
    # loss = -(7.3863515 - 1.7615942) / 2 = -2.8123787
    curr, data = batch_from_gaps([[0.0, math.log(2.0)], [math.log(2.0)]], [[9.0, -9.0], [1.0]], [3.0, -1.0])
    output, grad = run(make_loss("sapo", tau_pos=1.0, tau_neg=2.0), curr, data)
    assert close(output.loss.item(), -2.8123787, 1e-7)
    # grads: r = 1: -3/4 * 4 * .5 * .5 = -.75;  r = 2: -3/4 * 4 * .7310586 * .2689414 * 2 = -1.1796716
    #        A < 0: +1/2 * 4 * .8807971 * .1192029 * 2 = .4199743
    assert close(grad[0], [-0.75, -1.1796716], 1e-6)
    assert close(grad[1], [0.4199743, 0.0], 1e-6)
    # A token mean over the batch (3 tokens) instead of the paper's mean of means is off by far more than the tolerance.
    token_mean = -(3 * (2 + 2.9242343) - 1.7615942) / 3
    assert not close(output.loss.item(), token_mean, 1e-7)


def test_sapo_gradient_at_ratio_one_is_the_policy_gradient_for_every_temperature():
    curr, data = batch_from_gaps([[0.0], [0.0]], [[0.0], [0.0]], [1.5, -0.5])
    _, grad = run(make_loss("sapo", tau_pos=0.3, tau_neg=7.0), curr, data)
    assert close(grad[:, 0], [-0.75, 0.25])


def test_on_policy_grpo_ignores_how_far_the_policy_moved():
    curr, data = token_batch()
    _, grad = run(make_loss("on_policy_grpo"), curr, data)
    _, moved = run(make_loss("on_policy_grpo"), curr - 1.0, data)
    assert torch.equal(grad, moved)
