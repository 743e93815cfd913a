"""What holds for every objective: additivity, masking, finiteness, and what the shared outputs say."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_nemo.losses.bands import Band
from qarl_nemo.losses.ratios import Units, kl_k3, prox_ratio
from support.loss_batches import (
    CLIPPED,
    NAMES,
    SEQUENCE_LEVEL,
    batch_from_gaps,
    close,
    make_loss,
    random_batch,
    rows,
    run,
)

SEEDS = st.integers(0, 2**20)
SCALES = st.sampled_from([1e-4, 1e-3, 0.3])
QUICK = settings(max_examples=25, deadline=None)
# It would reject every response otherwise.
WIDE = {"mis_gspo": {"mismatch_low": 0.1, "mismatch_high": 10.0}}
every_objective = pytest.mark.parametrize("name", NAMES)


def total_of_parts(loss_fn, curr, data, cut):
    parts = [slice(0, cut), slice(cut, None)]
    outputs, grads = zip(*(run(loss_fn, curr[part], rows(data, part)) for part in parts), strict=True)
    metrics = {name: sum(output.metrics[name] for output in outputs) for name in outputs[0].metrics}
    return sum(output.loss for output in outputs), metrics, torch.cat(grads)


@every_objective
@QUICK
@given(SEEDS, SCALES, st.integers(1, 4))
def test_splitting_into_micro_batches_changes_nothing(name, seed, scale, cut):
    loss_fn = make_loss(name)
    curr, data = random_batch(seed, num_seqs=5, scale=scale)
    output, grad = run(loss_fn, curr, data)
    loss, metrics, grads = total_of_parts(loss_fn, curr, data, cut)
    assert close(loss.item(), output.loss.item(), 1e-12)
    assert close(grads, grad, 1e-12)
    assert metrics.keys() == output.metrics.keys()
    for key, value in output.metrics.items():
        assert close(metrics[key].item(), value.item(), 1e-12), key


@every_objective
def test_micro_batches_normalized_by_their_own_counts_do_not_add_up(name):
    curr, data = batch_from_gaps([[0.0], [0.0, 0.0], [0.0]], [[0.0], [0.0, 0.0], [0.0]], [1.0, 1.0, 1.0])
    whole, _ = run(make_loss(name), curr, data)
    local = 0.0
    for part in (slice(0, 1), slice(1, 3)):
        piece = rows(data, part)
        counts = {"global_valid_seqs": piece.sample_mask.sum(), "global_valid_toks": piece.token_mask.sum()}
        local += run(make_loss(name), curr[part], dataclasses.replace(piece, **counts))[0].loss.item()
    assert not close(local, whole.loss.item(), 1e-12)


@every_objective
@QUICK
@given(SEEDS, SCALES)
def test_masked_positions_contribute_nothing_whatever_they_hold(name, seed, scale):
    curr, data = random_batch(seed, scale=scale)
    clean, clean_grad = run(make_loss(name), curr, data)
    masked = (data.token_mask * data.sample_mask.unsqueeze(-1)) == 0
    junk = torch.tensor([math.nan, math.inf, -math.inf, 1e4], dtype=curr.dtype)
    planted = junk[torch.arange(masked.numel()) % len(junk)].view_as(curr)
    per_token = ("prev_logprobs", "generation_logprobs", "advantages", "entropy")
    dirty = {key: torch.where(masked, planted, getattr(data, key)) for key in per_token}
    output, grad = run(make_loss(name), torch.where(masked, planted, curr), dataclasses.replace(data, **dirty))
    assert torch.equal(output.loss, clean.loss)
    assert torch.equal(grad, clean_grad)
    assert torch.count_nonzero(grad[masked]) == 0
    for key, value in clean.metrics.items():
        assert torch.equal(output.metrics[key], value), key
    for key, value in clean.sequences.items():
        assert torch.equal(output.sequences[key], value), key


@every_objective
@QUICK
@given(SEEDS, st.sampled_from([50.0, 1e4]))
def test_extreme_gaps_stay_finite(name, seed, scale):
    curr, data = random_batch(seed, scale=scale, dtype=torch.float32)
    output, grad = run(make_loss(name), curr, data)
    assert output.loss.isfinite()
    assert grad.isfinite().all()
    assert all(value.isfinite() for value in output.metrics.values())


@every_objective
@pytest.mark.parametrize("prox", [-1e4, 1e4])
@pytest.mark.parametrize("mismatch", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_one_extreme_token_stays_finite(name, prox, mismatch, advantage):
    curr, data = batch_from_gaps([[0.0, prox]], [[0.0, mismatch]], [advantage], dtype=torch.float32)
    output, grad = run(make_loss(name), curr, data)
    assert output.loss.isfinite()
    assert grad.isfinite().all()


@every_objective
@pytest.mark.parametrize("where", ["curr", "prev_logprobs", "generation_logprobs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_valid_token_is_not_hidden(name, where, value):
    curr, data = batch_from_gaps([[0.0], [0.0, 0.0]], [[0.0], [0.0, 0.0]], [1.0, -1.0])
    target = curr.detach() if where == "curr" else getattr(data, where).clone()
    target[1, 0] = value
    if where == "curr":
        curr = target
    else:
        data = dataclasses.replace(data, **{where: target})
    output, grad = run(make_loss(name), curr, data)
    assert output.loss.isnan()
    assert grad[1].isnan().all(), "the whole response's, also where tokens have ratios of their own"
    assert output.sequences["prox_ratio"].isnan().tolist() == [False, True]


@every_objective
def test_a_micro_batch_without_valid_samples_has_zero_loss_and_a_graph(name):
    curr, data = random_batch(0)
    empty = dataclasses.replace(data, sample_mask=torch.zeros_like(data.sample_mask))
    output, grad = run(make_loss(name), curr, empty)
    assert output.loss.item() == 0.0
    assert torch.count_nonzero(grad) == 0
    assert all(value.item() == 0.0 for value in output.metrics.values())
    nothing_anywhere = dataclasses.replace(
        empty, global_valid_seqs=torch.tensor(0.0), global_valid_toks=torch.tensor(0.0)
    )
    assert run(make_loss(name), curr, nothing_anywhere)[0].loss.item() == 0.0


@every_objective
@QUICK
@given(SEEDS, st.sampled_from([1e-4, 1e-3, 0.5]))
def test_kept_says_which_responses_have_a_gradient(name, seed, scale):
    curr, data = random_batch(seed, num_seqs=6, scale=scale)
    output, grad = run(make_loss(name), curr, data)
    assert torch.equal(output.sequences["kept"], (grad != 0).any(dim=-1))


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_unit_outside_its_band_has_exactly_zero_gradient(name, advantage):
    outside = math.log(100.0) if advantage > 0 else -math.log(100.0)
    curr, data = batch_from_gaps([[outside], [0.0]], [[0.0], [0.0]], [advantage, advantage])
    _, grad = run(make_loss(name), curr, data)
    assert grad[0].item() == 0.0
    learns = advantage > 0 or name != "positive_grpo"
    assert (grad[1].item() != 0.0) == learns


def test_a_ratio_on_a_bound_is_in_the_band_and_learns():
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    band = Band.by_sign(advantages, positive=(0.5, 1.5), negative=(0.25, 2.0))
    ratio = torch.tensor([0.5, 1.5, 0.25, 2.0], requires_grad=True)
    band.clip(ratio).sum().backward()
    assert ratio.grad.tolist() == [1.0] * 4
    assert band.contains(ratio).all()
    metrics = band.metrics(ratio.detach(), Units.of(torch.ones(4), torch.tensor(4.0)))
    assert [metrics[f"num_in_band_{sign}"].item() for sign in ("positive", "negative")] == [2, 2]
    assert [value.item() for name, value in metrics.items() if "below" in name or "above" in name] == [0.0] * 4


def test_a_gate_that_is_shut_in_float32_keeps_nothing():
    # r = e^4 = 54.6: sigmoid(r - 1) is 1 in float32, and its slope is 0
    curr, data = batch_from_gaps([[4.0], [0.0]], [[0.0], [0.0]], [1.0, 1.0], dtype=torch.float32)
    output, grad = run(make_loss("sapo"), curr, data)
    assert (grad[:, 0] != 0).tolist() == [False, True]
    assert output.sequences["kept"].tolist() == [False, True]


@every_objective
def test_nothing_but_the_learners_own_log_probabilities_gets_a_gradient(name):
    curr, data = random_batch(2, scale=0.3)
    fields = ("prev_logprobs", "generation_logprobs", "advantages", "entropy")
    attached = {field: getattr(data, field).clone().requires_grad_() for field in fields}
    output, _ = run(make_loss(name, **WIDE.get(name, {})), curr, dataclasses.replace(data, **attached))
    assert [field for field, tensor in attached.items() if tensor.grad is not None] == []
    assert not output.logs.entropy.requires_grad


def test_ratios_are_clamped_at_20_and_nowhere_before():
    assert close(prox_ratio(torch.tensor([-19.0, 19.0], dtype=torch.float64)), [math.exp(-19.0), math.exp(19.0)])
    assert close(prox_ratio(torch.tensor([-21.0, 21.0], dtype=torch.float64)), [math.exp(-20.0), math.exp(20.0)])


@every_objective
def test_shared_metrics_match_numbers_derived_by_hand(name):
    # tokens: log r = .1, .3 | 0; log w = .2, -.2 | .4; sequences: r = e^.2, 1; w = 1, e^.4
    curr, data = batch_from_gaps([[0.1, 0.3], [0.0]], [[0.2, -0.2], [0.4]], [1.0, 0.0])
    entropy = torch.tensor([[0.5, 1.0], [3.0, 99.0]], dtype=torch.float64)
    output = make_loss(name)(curr, dataclasses.replace(data, entropy=entropy))
    metrics = output.metrics
    # k3(x) = e^x - 1 - x: k3(.1) = .0051709, k3(.3) = .0498588
    # k3(.2) = .0214028, k3(-.2) = .0187308, k3(.4) = .0918247
    assert close(metrics["kl_k3"].item(), (0.0051709 + 0.0498588) / 3, 1e-6)
    assert close(metrics["mismatch_kl_k3"].item(), (0.0214028 + 0.0187308 + 0.0918247) / 3, 1e-6)
    assert close(metrics["entropy"].item(), 1.5)  # (.5 + 1 + 3) / 3; the masked 99 is not in it
    assert close(metrics["prox_ratio_mean"].item(), (math.exp(0.2) + 1) / 2)
    assert close(metrics["mismatch_weight_mean"].item(), (1 + math.exp(0.4)) / 2)
    assert metrics["fraction_positive"].item() == (0.5 if name in SEQUENCE_LEVEL else pytest.approx(2 / 3))
    assert metrics["total"].item() == output.loss.item()
    # A mean per response of means per token would give the KL another value than the token mean.
    assert not close(metrics["kl_k3"].item(), (0.0051709 + 0.0498588) / 4, 1e-6)


@every_objective
def test_sequence_values_are_uncapped_detached_and_complete(name):
    curr, data = batch_from_gaps([[0.1, 0.3], [0.0]], [[2.0, 2.0], [-3.0]], [1.0, -2.0])
    sequences = make_loss(name)(curr, data).sequences
    assert sequences.keys() == {"prox_ratio", "mismatch_weight", "advantage", "length_tokens", "kept", "valid"}
    assert not any(value.requires_grad for value in sequences.values())
    assert close(sequences["prox_ratio"], [math.exp(0.2), 1.0])
    assert close(sequences["mismatch_weight"], [math.exp(2.0), math.exp(-3.0)])
    assert sequences["advantage"].tolist() == [1.0, -2.0]
    assert sequences["length_tokens"].tolist() == [2, 1]
    assert sequences["valid"].tolist() == [True, True]


@every_objective
def test_a_response_without_tokens_is_not_valid_but_counts_in_the_callers_denominator(name):
    curr, data = batch_from_gaps([[0.0], [0.0]], [[0.0], [0.0]], [1.0, 1.0])
    output, grad = run(make_loss(name), curr, dataclasses.replace(data, token_mask=torch.tensor([[1.0], [0.0]])))
    assert output.sequences["valid"].tolist() == [True, False]
    assert output.metrics["num_valid_seqs"].item() == 1
    assert output.metrics["prox_ratio_mean"].item() == 0.5  # 1 of 2 global responses
    assert grad.flatten()[1].item() == 0.0


@every_objective
def test_metrics_carry_no_graph(name):
    curr, data = random_batch(3)
    output = make_loss(name)(curr.requires_grad_(), data)
    assert output.loss.requires_grad
    assert not any(value.requires_grad for value in output.metrics.values())


def test_k3_is_accurate_in_float32_where_it_is_small():
    # k3(1e-4) = x^2 / 2 + x^3 / 6 = 5.000167e-9
    x = torch.tensor(1e-4)
    assert kl_k3(x).item() == pytest.approx(5.000167e-9, rel=1e-2)
    assert (x.exp() - 1 - x).item() != pytest.approx(5.000167e-9, rel=1e-2)


def test_misaligned_or_narrow_inputs_are_named_together():
    curr, data = random_batch(0, num_seqs=1, dtype=torch.float32)
    unsliced = torch.zeros(1, curr.shape[1] + 1)
    bad = dataclasses.replace(
        data, advantages=unsliced, sample_mask=torch.ones(2), prev_logprobs=data.prev_logprobs.bfloat16()
    )
    with pytest.raises(ValueError, match="aligned") as error:
        make_loss("tbpo")(curr, bad)
    for part in ("advantages is [1, 6], not [1, 5]", "sample_mask is [2], not [1]", "prev_logprobs is torch.bfloat16"):
        assert part in str(error.value)
