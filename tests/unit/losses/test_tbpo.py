import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.loss_batches import batch_from_gaps, close, make_loss, random_batch, rows, run

WIDE = {"positive_clip_high": 0.1, "negative_clip_low": 0.1, "negative_clip_high": 0.2, "mismatch_cap": 2.0}
LOG_PROX = [[0.02, 0.04], [0.1, 0.3], [0.1, 0.15, 0.2], [0.5], [-0.5, -0.1]]
LOG_MISMATCH = [[0.1, 0.3], [0.5, -0.5], [0.0, 1.0, 2.0], [-1.5], [0.0, 0.0]]
ADVANTAGES = [1.0, 2.0, -1.0, -0.5, -1.0]


def hand_batch():
    return batch_from_gaps(LOG_PROX, LOG_MISMATCH, ADVANTAGES)


def by_hand(variant: str = "") -> float:
    """The loss of `hand_batch` in plain Python, one response at a time; `variant` plants one mistake."""
    terms = []
    for log_prox, log_mismatch, advantage in zip(LOG_PROX, LOG_MISMATCH, ADVANTAGES, strict=True):
        length = 1 if variant == "product instead of geometric mean" else len(log_prox)
        ratio, log_weight = math.exp(sum(log_prox) / length), sum(log_mismatch) / length
        floor = -math.inf if variant == "cap above only" else -math.log(2.0)
        weight = 1.0 if variant == "no weight" else math.exp(max(floor, min(log_weight, math.log(2.0))))
        clipped = min(ratio, 1.1) if advantage > 0 else max(0.9, min(ratio, 1.2))
        if variant == "lower clip for positives" and advantage > 0:
            clipped = max(clipped, 1.05)
        term = weight * clipped * advantage
        if variant == "outer min for negatives":
            term = min(term, weight * ratio * advantage)
        terms.append(term)
    return -sum(terms) / (2 if variant == "mean over kept responses" else len(terms))


def test_loss_and_gradient_match_numbers_derived_by_hand():
    output, grad = run(make_loss("tbpo", **WIDE), *hand_batch())
    # 0: r = e^.03, in [0, 1.1];   w = e^.2               -> e^.23 * 1         =  1.2586000
    # 1: r = e^.2 = 1.22 > 1.1, dropped; w = 1            -> 1.1 * 2           =  2.2
    # 2: r = e^.15 = 1.16, in [.9, 1.2]; w = e^1 -> 2     -> 2 * 1.1618342 * -1 = -2.3236685
    # 3: r = e^.5 = 1.65 > 1.2, dropped; w = e^-1.5 -> .5 -> .5 * 1.2 * -.5    = -0.3
    # 4: r = e^-.3 = .74 < .9, dropped;  w = 1            -> .9 * -1           = -0.9
    # J = -0.0650685 / 5, loss = 0.0130137
    assert close(output.loss.item(), 0.0130137, 1e-6)
    # d loss / d curr_t = -w r A / (L * 5): 0: -1.2586 / 10; 2: 2.3236685 / 15; the others exactly 0
    assert close(grad[0, :2], [-0.12586, -0.12586], 1e-6)
    assert close(grad[2], [0.1549112] * 3, 1e-6)
    assert torch.count_nonzero(grad[[1, 3, 4]]) == 0
    assert output.sequences["kept"].tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(
    "mistake",
    [
        "product instead of geometric mean",
        "cap above only",
        "no weight",
        "lower clip for positives",
        "outer min for negatives",
        "mean over kept responses",
    ],
)
def test_the_tolerance_tells_the_paper_from_a_mistake(mistake):
    output, _ = run(make_loss("tbpo", **WIDE), *hand_batch())
    assert close(output.loss.item(), by_hand())
    assert not close(output.loss.item(), by_hand(mistake))


def test_band_metrics_match_hand_counts():
    metrics = make_loss("tbpo", **WIDE)(*hand_batch()).metrics
    # positives: 0 in, 1 above; negatives: 2 in, 3 above, 4 below; log w of 2 (1.0) and 3 (-1.5) leave +-log 2
    expected = {
        "fraction_positive": 0.4,
        "fraction_negative": 0.6,
        "in_band_fraction_positive": 0.2,
        "above_band_fraction_positive": 0.2,
        "below_band_fraction_positive": 0.0,
        "in_band_fraction_negative": 0.2,
        "above_band_fraction_negative": 0.2,
        "below_band_fraction_negative": 0.2,
        "num_in_band_positive": 1,
        "num_in_band_negative": 1,
        "mismatch_capped_fraction": 0.4,
        "kept_fraction": 0.4,
        "num_valid_seqs": 5,
        "num_valid_toks": 10,
    }
    assert {name: pytest.approx(metrics[name].item()) for name in expected} == expected


def test_defaults_are_the_papers_clip_lines():
    # r = 1 +- 1e-6 around each line: 1.0004 for A > 0; 0.9997 and 1.0007 for A < 0
    log_ratios = [math.log(line + step) for line in (1.0004, 0.9997, 1.0007) for step in (-1e-6, 1e-6)]
    curr, data = batch_from_gaps([[x] for x in log_ratios], [[0.0]] * 6, [1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    kept = make_loss("tbpo")(curr, data).sequences["kept"]
    assert kept.tolist() == [True, False, False, True, True, False]


def test_zero_advantage_contributes_nothing_and_is_in_no_band():
    curr, data = batch_from_gaps([[0.0], [0.0]], [[0.3], [0.0]], [0.0, 1.0])
    output, grad = run(make_loss("tbpo"), curr, data)
    assert grad[0].item() == 0.0
    assert output.loss.item() == -0.5  # -(0 + 1) / 2: it stays in the denominator
    assert output.metrics["in_band_fraction_positive"].item() == 0.5
    assert output.metrics["fraction_negative"].item() == 0.0
    assert output.sequences["kept"].tolist() == [False, True]


def test_the_mismatch_weight_is_detached():
    curr, data = batch_from_gaps([[0.01], [0.02]], [[0.1], [-0.2]], [1.0, -1.0])
    attached = data.prev_logprobs.requires_grad_(), data.generation_logprobs.requires_grad_()
    make_loss("tbpo", **WIDE)(curr, data).loss.backward()
    assert all(tensor.grad is None for tensor in attached)
    # dL/dcurr = -w r A / 2; with w = exp(curr - generation) left attached the derivative of w would double it.
    expected = [-math.exp(0.1 + 0.01) / 2, math.exp(-0.2 + 0.02) / 2]
    assert close(curr.grad[:, 0], expected)
    assert not close(curr.grad[:, 0], [2 * value for value in expected])


def clipped_sequence_loss(curr, data, *, clip_min, clip_max, clip_c):
    """NeMo-RL's clipped loss with sequence-level ratios and a sequence mean, written from its description.

    max(-A r, -A clip(r, 1-min, 1+max)), for A < 0 at most -A c; r the geometric mean over the response's tokens.
    """
    length = data.token_mask.sum(-1)
    ratio = (((curr - data.prev_logprobs) * data.token_mask).sum(-1) / length).exp()
    advantage = data.advantages[:, 0]
    worst = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_min, 1 + clip_max))
    if clip_c is not None:
        worst = torch.where(advantage < 0, torch.minimum(worst, -advantage * clip_c), worst)
    return (worst * data.sample_mask).sum() / data.global_valid_seqs


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([1e-4, 5e-4, 1e-2]))
def test_with_weight_one_gradient_equals_nemo_rl_clipped_loss(seed, scale):
    curr, data = random_batch(seed, scale=scale)
    assume(data.global_valid_seqs > 0)  # NeMo-RL's loss divides by it
    data.generation_logprobs.copy_(data.prev_logprobs)
    _, grad = run(make_loss("tbpo"), curr, data)
    leaf = curr.clone().requires_grad_()
    clipped_sequence_loss(leaf, data, clip_min=0.0003, clip_max=0.0004, clip_c=1.0007).backward()
    assert close(grad, leaf.grad, 1e-12)


@pytest.mark.parametrize("clip_c", [None, 1.0004])
def test_the_comparison_with_nemo_rl_notices_a_wrong_upper_band(clip_c):
    # A < 0: r = 1.0005 is in the band (an upper line at 1.0004 drops it), r = 1.01 outside (no upper line keeps it)
    curr, data = batch_from_gaps([[math.log(1.0005)], [math.log(1.01)]], [[0.0], [0.0]], [-1.0, -1.0])
    _, grad = run(make_loss("tbpo"), curr, data)
    leaf = curr.detach().clone().requires_grad_()
    clipped_sequence_loss(leaf, data, clip_min=0.0003, clip_max=0.0004, clip_c=clip_c).backward()
    assert not close(grad, leaf.grad, 1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([2e-4, 1e-3, 1e-1]))
def test_a_response_outside_its_band_has_exactly_zero_gradient(seed, scale):
    curr, data = random_batch(seed, num_seqs=6, scale=scale)
    _, grad = run(make_loss("tbpo"), curr, data)
    for row in range(len(curr)):
        length = int(data.token_mask[row].sum())
        ratio = math.exp((curr - data.prev_logprobs)[row, :length].mean().item())
        advantage = data.advantages[row, 0].item()
        upper, lower = (1.0004, 0.0) if advantage > 0 else (1.0007, 0.9997)
        learns = advantage != 0 and lower <= ratio <= upper and data.sample_mask[row] > 0
        assert (torch.count_nonzero(grad[row]) > 0) == learns


def test_a_dropped_response_does_not_rescale_the_others():
    curr, data = batch_from_gaps([[0.0], [5.0]], [[0.0], [0.0]], [1.0, -1.0])
    _, with_dropped = run(make_loss("tbpo"), curr, data)
    _, alone = run(make_loss("tbpo"), curr[:1], rows(data, slice(0, 1)))
    assert torch.equal(with_dropped[:1], alone)
    assert alone.item() == -0.5
