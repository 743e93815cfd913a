"""The metrics that NeMo-RL's loop expects of its clipped loss, computed for the loss that takes its place."""

import math

import torch
from torch import Tensor

from qarl_nemo.losses.ratios import LogRatios
from qarl_nemo.losses.reference_kl import kl_estimate


def nemo_metrics(
    logs: LogRatios, curr: Tensor, generation: Tensor, *, kl_type: str, clip: tuple[float, float]
) -> dict[str, Tensor]:
    """Compute NeMo-RL's metrics under its names; all are additive except the four extremes, which cover this call only.

    Args:
        logs: the compared micro-batch.
        curr: [B, T] log-probabilities now, detached.
        generation: [B, T] the sampler's log-probabilities.
        kl_type: `reference_policy_kl_type`, the estimator of both mismatch KLs.
        clip: bounds of `probs_ratio_clamped`: NeMo-RL's settings, not the objective's.

    Returns:
        Scalars by name. `approx_entropy` estimates the policy's entropy by the sampled tokens' weighted -log p.
    """
    valid, tokens = logs.tokens.valid, logs.tokens
    curr, generation = (torch.where(valid, values, 0.0) for values in (curr, generation))
    gap = logs.log_mismatch
    ratio = logs.log_prox.detach().exp()
    clamped = ratio.clamp(*clip)
    mixture = torch.logaddexp(generation + gap, generation) - math.log(2.0)
    divergence = kl_estimate(generation + gap - mixture, "k3") + kl_estimate(generation - mixture, "k3")
    return {
        "token_mult_prob_error": tokens.average((gap.abs() * tokens.weight).exp()),
        "gen_kl_error": tokens.average(kl_estimate(gap, kl_type)),
        "policy_kl_error": tokens.average(kl_estimate(-gap, kl_type)),
        "js_divergence_error": tokens.average(divergence / 2),
        "sampling_importance_ratio": tokens.average(gap.exp().nan_to_num(0.0, 0.0, 0.0)),
        "approx_entropy": -tokens.average((curr - generation).exp() * curr),
        "probs_ratio": tokens.average(ratio),
        "probs_ratio_clamped": tokens.average(clamped),
        **_extremes("probs_ratio", ratio, valid),
        **_extremes("probs_ratio_clamped", clamped, valid),
    }


def _extremes(name: str, values: Tensor, valid: Tensor) -> dict[str, Tensor]:
    return {
        f"{name}_min": torch.where(valid, values, math.inf).amin(),
        f"{name}_max": torch.where(valid, values, -math.inf).amax(),
    }
