import math

import pytest
import torch

from support.loss_batches import batch_from_gaps, close, make_loss, run

# Clip lines 0.9 and 1.1. Geometric means: r = e^.05 = 1.0512711, e^.2 = 1.2214028, e^.2 = 1.2214028, e^-.2 = .8187308.
LOG_PROX = [[0.0, 0.1], [0.2], [0.1, 0.3], [-0.2]]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0]
CLIP = {"clip_low": 0.1, "clip_high": 0.1}


def test_gspo_matches_numbers_derived_by_hand():
    curr, data = batch_from_gaps(LOG_PROX, [[0.5, 0.5], [0.5], [0.5, 0.5], [0.5]], ADVANTAGES)
    output, grad = run(make_loss("gspo", **CLIP), curr, data)
    # min(r A, clip(r) A): 1.0512711; 1.1 (dropped); -1.2214028 (PPO keeps it: no upper line for A < 0); -.9 (dropped)
    # loss = -(1.0512711 + 1.1 - 1.2214028 - .9) / 4 = -.0074671
    assert close(output.loss.item(), -0.0074671, 1e-6)
    assert close(grad[0], [-1.0512711 / 8] * 2, 1e-6)
    assert close(grad[2], [1.2214028 / 8] * 2, 1e-6)
    assert torch.count_nonzero(grad[[1, 3]]) == 0
    # With an upper band for negatives, TBPO's point, response 2 would stop at 1.1 and the tolerance would notice.
    assert not close(output.loss.item(), -(1.0512711 + 1.1 - 1.1 - 0.9) / 4, 1e-6)


def test_mis_gspo_rejects_by_mismatch_weight_and_keeps_the_denominator():
    log_weights = [math.log(1.5), 0.0, math.log(0.8), 0.0]  # band [.9, 2]: response 2 is rejected
    curr, data = batch_from_gaps(
        LOG_PROX, [[x] * len(r) for x, r in zip(log_weights, LOG_PROX, strict=True)], ADVANTAGES
    )
    output, grad = run(make_loss("mis_gspo", mismatch_low=0.9, mismatch_high=2.0, **CLIP), curr, data)
    # 1.5 * 1.0512711 = 1.5769066; 1.1; rejected 0; -.9: loss = -1.7769066 / 4 = -.4442267
    assert close(output.loss.item(), -0.4442267, 1e-6)
    assert close(grad[0], [-1.5769066 / 8] * 2, 1e-6)
    assert torch.count_nonzero(grad[1:]) == 0
    assert output.metrics["mismatch_rejected_fraction"].item() == 0.25
    assert output.sequences["kept"].tolist() == [True, False, False, False]
    # Dividing by the three accepted responses instead of all four fails the same tolerance.
    assert not close(output.loss.item(), -1.7769066 / 3, 1e-6)


def test_mis_gspo_inside_the_band_with_weight_one_is_gspo():
    curr, data = batch_from_gaps(LOG_PROX, [[0.0] * len(row) for row in LOG_PROX], ADVANTAGES)
    rejecting, grad = run(make_loss("mis_gspo", **CLIP), curr, data)
    plain, plain_grad = run(make_loss("gspo", **CLIP), curr, data)
    assert torch.equal(rejecting.loss, plain.loss)
    assert torch.equal(grad, plain_grad)


@pytest.mark.parametrize("log_weight", [-0.0011, 0.0021])
def test_mis_gspo_default_band_ends_at_its_bounds(log_weight):
    # log .999 = -.0010005 and log 1.002 = .0019980
    curr, data = batch_from_gaps([[0.0], [0.0]], [[log_weight], [log_weight * 0.9]], [1.0, 1.0])
    assert make_loss("mis_gspo")(curr, data).sequences["kept"].tolist() == [False, True]
