"""One policy update: micro-batches, minibatches, and what a non-finite loss does."""

import math
from dataclasses import replace

import pytest
import torch

from qarl_nemo.losses.config import GSPOConfig, TBPOConfig
from qarl_nemo.train.config import AdamWConfig
from qarl_nemo.train.rollouts import Rollouts
from support.asserts import assert_bitwise_equal
from support.engines import PROMPTS, W4A16_G32, make_engine, sample, tiny_model, weights_of

NUM = 16
ALL = [torch.arange(NUM)]
# wide lines, so that no response is dropped and every row matters
WIDE_TBPO = TBPOConfig(positive_clip_high=0.5, negative_clip_low=0.5, negative_clip_high=0.5)


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    return sample(make_engine(), prompts=PROMPTS * 4, tokens=8)


def advantages() -> torch.Tensor:
    return torch.linspace(-1.5, 1.5, NUM)


def prev_logprobs(engine, rollouts):
    """The old policy's, a little off, so that ratios are not 1."""
    prev = engine.learner.prev_logprobs(rollouts)
    return prev + 0.01 * torch.randn(prev.shape, generator=torch.Generator().manual_seed(1))


def update(engine, rollouts, minibatches=ALL, advantages=advantages):
    return engine.learner.update(rollouts, prev_logprobs(engine, rollouts), advantages(), minibatches)


def gradients(engine) -> torch.Tensor:
    """AdamW's first moment after one step is (1 - beta1) times the gradient."""
    adamw = engine.optimizer.optimizers[0]
    return torch.cat([state["exp_avg"].flatten() for state in adamw.state.values()]) / (1 - 0.9)


@pytest.mark.parametrize(
    "loss", [None, WIDE_TBPO, GSPOConfig(clip_low=0.5, clip_high=0.5)], ids=["tis", "tbpo", "gspo"]
)
@pytest.mark.parametrize("size", [1, 5, 8])
def test_micro_batches_change_nothing(rollouts, loss, size):
    whole, split = make_engine(loss=loss), make_engine(loss=loss, micro_batch_size=size)
    expected, found = update(whole, rollouts), update(split, rollouts)
    reference = gradients(whole)
    assert (gradients(split) - reference).abs().max() < 1e-5 * reference.abs().max()
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert torch.allclose(found.curr_logprobs, expected.curr_logprobs, atol=1e-5)
    for name, values in expected.sequences.items():
        assert torch.allclose(found.sequences[name].double(), values.double(), atol=1e-5), name


def test_the_tolerance_notices_a_missing_response_and_a_local_mean(rollouts):
    whole, missing, local = make_engine(), make_engine(), make_engine()
    update(whole, rollouts)
    reference = gradients(whole)
    update(missing, rollouts, [torch.arange(NUM - 1)])
    # normalized by their own token counts, two halves weigh the same though their lengths differ
    first, second = rollouts.response_mask[:8].sum(), rollouts.response_mask[8:].sum()
    assert first != second
    update(local, rollouts, [torch.arange(8)])
    other = make_engine()
    update(other, rollouts, [torch.arange(8, NUM)])
    for found in (gradients(missing), (gradients(local) + gradients(other)) / 2):
        assert (found - reference).abs().max() > 1e-3 * reference.abs().max()


def test_a_response_without_a_token_is_no_part_of_the_mean(rollouts):
    whole, without = make_engine(loss=WIDE_TBPO), make_engine(loss=WIDE_TBPO)
    mask = rollouts.response_mask.clone()
    mask[3] = False
    metrics = update(whole, replace(rollouts, response_mask=mask)).metrics
    expected = update(without, rollouts, [ALL[0][ALL[0] != 3]]).metrics
    assert metrics["loss/num_valid_seqs"] == expected["loss/num_valid_seqs"] == NUM - 1
    reference = gradients(without)
    # Counted in the mean, it would take a sixteenth off.
    assert (gradients(whole) - reference).abs().max() < 1e-5 * reference.abs().max()


def test_each_minibatch_takes_one_step_and_the_next_sees_the_new_weights(rollouts):
    engine = make_engine(W4A16_G32)
    prev = engine.learner.prev_logprobs(rollouts)
    order = torch.randperm(NUM, generator=torch.Generator().manual_seed(3))
    minibatches = list(order.split(4))
    result = engine.learner.update(rollouts, prev, advantages(), minibatches)
    assert engine.optimizer.num_steps == engine.report.changes.count == 4
    gap = (result.curr_logprobs - prev).abs() * rollouts.response_mask
    assert gap[minibatches[0]].max() < 1e-5
    assert all(gap[rows].max() > 1e-3 for rows in minibatches[1:])
    ratios = result.sequences["prox_ratio"]
    assert torch.allclose(ratios[minibatches[0]], torch.ones(4), atol=1e-5)
    assert (ratios[minibatches[-1]] - 1).abs().max() > 1e-3


def test_prev_logprobs_do_not_depend_on_the_batch_size(rollouts):
    engine = make_engine()
    whole = engine.learner.prev_logprobs(rollouts)
    engine.learner.logprob_batch_size = 3
    assert torch.allclose(engine.learner.prev_logprobs(rollouts), whole, atol=1e-5)
    assert not whole.requires_grad


def test_per_response_values_come_back_in_rollout_order(rollouts):
    engine = make_engine(micro_batch_size=3)
    order = torch.randperm(NUM, generator=torch.Generator().manual_seed(3))
    result = update(engine, rollouts, list(order.split(8)))
    assert torch.allclose(result.sequences["advantage"], advantages(), atol=1e-6)
    assert result.sequences["length_tokens"].tolist() == rollouts.response_mask.sum(-1).tolist()
    assert not torch.allclose(result.sequences["advantage"], advantages()[order], atol=1e-2)


def test_counts_add_up_over_minibatches_and_rates_average(rollouts):
    engine = make_engine(loss=WIDE_TBPO)
    metrics = update(engine, rollouts, list(torch.arange(NUM).split(4))).metrics
    assert metrics["loss/num_valid_seqs"] == NUM
    assert metrics["loss/num_valid_toks"] == int(rollouts.response_mask.sum())
    # advantages -1.5 .. 1.5 in 16 equal steps: eight of each sign
    assert metrics["loss/fraction_positive"] == metrics["loss/fraction_negative"] == 0.5
    assert metrics["optim/lr"] == pytest.approx(1e-3)
    assert metrics["optim/skipped_steps"] == 0


def test_the_objective_weighs_what_the_engine_said(rollouts):
    engine = make_engine()
    # As of an engine that gave every token a little less than the learner does.
    sampled = replace(rollouts, generation_logprobs=rollouts.generation_logprobs - 0.25 * rollouts.response_mask)
    result = engine.learner.update(sampled, engine.learner.prev_logprobs(sampled), advantages(), ALL)
    assert result.metrics["loss/mismatch_weight_mean"] == pytest.approx(math.exp(0.25), abs=1e-3)


def test_entropy_is_that_of_the_policy_at_the_sampling_temperature(rollouts):
    engine = make_engine(temperature=2.0)
    logprobs, entropy = engine.learner.token_logprobs(rollouts.select(torch.arange(NUM)))
    # by hand for one token: the first response token of row 2, the one prompt without padding
    ids = rollouts.input_ids[2, : rollouts.num_prompt_columns][None]
    with torch.no_grad():
        distribution = (engine.model(input_ids=ids).logits[0, -1] / 2.0).softmax(-1)
    token = rollouts.input_ids[2, rollouts.num_prompt_columns]
    assert logprobs[2, 0].item() == pytest.approx(distribution[token].log().item(), abs=1e-5)
    assert entropy[2, 0].item() == pytest.approx(-(distribution * distribution.log()).sum().item(), abs=1e-5)
    assert not entropy.requires_grad


class BrokenLoss:
    """The engine's own objective, spoiled on the calls that `calls` names."""

    def __init__(self, loss_fn, kind: str, calls: set[int]):
        self.loss_fn, self.kind, self.calls, self.count = loss_fn, kind, calls, 0

    def __call__(self, logprobs, data):
        out = self.loss_fn(logprobs, data)
        self.count += 1
        if self.count - 1 not in self.calls:
            return out
        if self.kind == "value only":  # a constant that is not finite leaves the gradient finite
            return replace(out, loss=out.loss + float("inf"))
        return replace(out, loss=out.loss * float("nan"))


@pytest.mark.parametrize("kind", ["value only", "gradient"])
def test_a_non_finite_loss_skips_its_step_and_nothing_else(rollouts, kind):
    engine, spared = make_engine(), make_engine()
    engine.learner.loss_fn = BrokenLoss(engine.learner.loss_fn, kind, {0})
    before = weights_of(engine.model)
    prev = prev_logprobs(engine, rollouts)
    result = engine.learner.update(rollouts, prev, advantages(), ALL)
    assert result.metrics["optim/skipped_steps"] == 1
    assert engine.optimizer.num_steps == engine.report.changes.count == 0
    for name, weight in weights_of(engine.model).items():
        assert_bitwise_equal(weight, before[name])
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    # the next update is the one an engine takes that never saw the broken loss
    engine.learner.update(rollouts, prev, advantages(), ALL)
    spared.learner.update(rollouts, prev, advantages(), ALL)
    for name, weight in weights_of(spared.model).items():
        assert_bitwise_equal(weights_of(engine.model)[name], weight)


def test_one_broken_micro_batch_skips_its_minibatch_only(rollouts):
    engine = make_engine(micro_batch_size=4)
    # two minibatches of two micro-batches: call 1 belongs to the first
    engine.learner.loss_fn = BrokenLoss(engine.learner.loss_fn, "gradient", {1})
    result = update(engine, rollouts, list(torch.arange(NUM).split(8)))
    assert result.metrics["optim/skipped_steps"] == 1
    assert engine.optimizer.num_steps == engine.report.changes.count == 1


def test_a_non_finite_advantage_is_caught_too(rollouts):
    engine = make_engine()
    result = update(engine, rollouts, advantages=lambda: advantages().index_fill(0, torch.tensor([3]), float("inf")))
    assert result.metrics["optim/skipped_steps"] == 1


def test_gradients_reach_every_parameter_but_unused_embeddings(rollouts):
    engine = make_engine(targets=("experts", "attention"))
    before = weights_of(engine.model)
    update(engine, rollouts)
    still = [name for name, weight in weights_of(engine.model).items() if torch.equal(weight, before[name])]
    assert still == []


def test_a_bf16_learner_trains(rollouts):
    engine = make_engine(model=tiny_model(dtype=torch.bfloat16))
    before = weights_of(engine.model)
    result = update(engine, rollouts)
    assert result.metrics["optim/skipped_steps"] == 0
    assert result.curr_logprobs.dtype == torch.float32
    assert any(not torch.equal(weight, before[name]) for name, weight in weights_of(engine.model).items())


def test_each_micro_batch_is_added_to_the_masters_and_the_rate_is_that_of_the_step(rollouts, monkeypatch):
    engine = make_engine(optimizer=AdamWConfig(lr=0.1, warmup_steps=10))
    calls, optimizer = [], engine.optimizer
    accumulate = optimizer.accumulate
    monkeypatch.setattr(optimizer, "accumulate", lambda: (calls.append(optimizer.num_steps), accumulate()))
    engine.learner.micro_batch_size = 1
    rows = torch.arange(len(rollouts.input_ids))
    advantages = torch.ones(len(rows))
    result = engine.learner.update(rollouts, engine.learner.prev_logprobs(rollouts), advantages, [rows])
    # In FP32 after each backward, and once more in the step, where nothing is left.
    assert len(calls) == len(rows) + 1
    assert result.metrics["optim/lr"] == pytest.approx(0.01)
