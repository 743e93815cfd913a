"""Masks are weights, as in NeMo-RL: a fraction of a response counts as such in sums and denominators."""

import dataclasses

import pytest
import torch

from support.loss_batches import NAMES, batch_from_gaps, close, make_loss, random_batch, rows, run

every_objective = pytest.mark.parametrize("name", NAMES)


def weighed(data, sample_mask):
    sample_mask = torch.tensor(sample_mask, dtype=torch.float64)
    return dataclasses.replace(
        data,
        sample_mask=sample_mask,
        global_valid_seqs=sample_mask.sum(),
        global_valid_toks=(data.token_mask * sample_mask.unsqueeze(-1)).sum(),
    )


def two_responses():
    # on the policy and the sampler: every ratio and weight is 1, so a token's term is -A
    return batch_from_gaps([[0.0], [0.0, 0.0, 0.0]], [[0.0], [0.0, 0.0, 0.0]], [1.0, -2.0])


@pytest.mark.parametrize(
    ("name", "loss", "gradient"),
    [
        # responses weigh .5 and .25: -(.5 * 1 + .25 * -2) / .75 = 0; d/dcurr = -w A / (L * .75)
        ("tbpo", 0.0, [-0.5 / 0.75, 0.25 * 2 / (3 * 0.75)]),
        ("gspo", 0.0, [-0.5 / 0.75, 0.25 * 2 / (3 * 0.75)]),
        # tokens weigh .5 and 3 * .25, 1.25 in all: -(.5 * 1 + .75 * -2) / 1.25 = .8
        ("grpo_tis", 0.8, [-0.5 / 1.25, 0.25 * 2 / 1.25]),
        ("dual_clip_grpo", 0.8, [-0.5 / 1.25, 0.25 * 2 / 1.25]),
    ],
)
def test_fractions_weigh_as_numbers_derived_by_hand(name, loss, gradient):
    curr, data = two_responses()
    output, grad = run(make_loss(name), curr, weighed(data, [0.5, 0.25]))
    assert close(output.loss.item(), loss)
    assert close([grad[0, 0], grad[1, 0]], gradient)
    assert close(output.metrics["kept_fraction"].item(), 1.0)
    # counts stay counts
    assert (output.metrics["num_valid_seqs"].item(), output.metrics["num_valid_toks"].item()) == (2, 4)
    counted, _ = run(make_loss(name), curr, weighed(data, [1.0, 1.0]))
    assert abs(counted.loss.item() - loss) > 0.1, "counting a fraction as a whole is another loss"


@every_objective
@pytest.mark.parametrize("seed", range(2))
def test_a_response_of_weight_two_is_that_response_twice(name, seed):
    curr, data = random_batch(seed, num_seqs=4, scale=0.3)
    twice = [0, 1, 1, 2, 3]
    whole, grad = run(make_loss(name), curr, weighed(data, [1.0, 2.0, 1.0, 0.0]))
    copied, copied_grad = run(make_loss(name), curr[twice], weighed(rows(data, twice), [1.0, 1.0, 1.0, 1.0, 0.0]))
    assert close(whole.loss.item(), copied.loss.item())
    assert close(grad[1], copied_grad[1] + copied_grad[2])
    assert close(grad[0], copied_grad[0])
    for key, value in whole.metrics.items():
        assert key.startswith("num_") or close(value.item(), copied.metrics[key].item()), key


@every_objective
@pytest.mark.parametrize("seed", range(2))
def test_only_relative_weights_matter_also_where_they_sum_to_less_than_one(name, seed):
    curr, data = random_batch(seed, num_seqs=4, scale=0.3)
    whole, grad = run(make_loss(name), curr, weighed(data, [1.0, 0.5, 0.0, 2.0]))
    small, small_grad = run(make_loss(name), curr, weighed(data, [0.0625, 0.03125, 0.0, 0.125]))
    assert close(whole.loss.item(), small.loss.item())
    assert close(grad, small_grad)


@every_objective
def test_a_tokens_weight_counts_within_its_response(name):
    # the second token of the first response weighs a third of the first one; A differs between them
    curr, data = batch_from_gaps([[0.0, 0.0]], [[0.0, 0.0]], [1.0])
    mask = torch.tensor([[0.75, 0.25]])
    advantages = torch.tensor([[2.0, -2.0]], dtype=torch.float64)
    data = dataclasses.replace(data, token_mask=mask, advantages=advantages, global_valid_toks=mask.sum())
    output, _ = run(make_loss(name), curr, data)
    assert output.sequences["advantage"].item() == 1.0  # .75 * 2 - .25 * 2
    assert output.sequences["length_tokens"].item() == 2
