"""Training-inference mismatch: how far the learner's prev_logprobs are from the sampler's generation_logprobs.

With the log mismatch weight d = prev - generation of one token, sampled by the rollout engine:
    |gap| = |d|          k1 = -d          k3 = exp(d) - 1 - d
k1 and k3 estimate KL(sampler || learner), both unbiased; k1 is noisy, k3 never negative. A sequence's weight is the
geometric mean exp(mean_t d_t), the quantity TBPO caps. Shapes: B sequences, T predicted tokens.
"""

import torch
from torch import Tensor

from qarl_nemo.losses.ratios import MAX_LOG_RATIO, kl_k3

_QUANTILES = {"p01": 0.01, "p50": 0.50, "p99": 0.99}


def mismatch_metrics(prev_logprobs: Tensor, generation_logprobs: Tensor, token_mask: Tensor) -> dict[str, float]:
    """Measure |gap|, k1 and k3 KL per token and the quantiles of exp(mean_t(prev - generation)) per sequence.

    A token with a non-finite logprob under either policy is counted and left out of every other figure, numerator and
    denominator, so that one broken token does not hide the rest.

    Args:
        prev_logprobs: [B, T] the learner's logprobs before the update, nats.
        generation_logprobs: [B, T] the rollout engine's logprobs of the same tokens, nats.
        token_mask: [B, T] bool or 0/1, true for response tokens.

    Returns:
        `mismatch/` abs_gap_mean, abs_gap_max, kl_k1, kl_k3 (nats), weight_p01, weight_p50, weight_p99, nonfinite_tokens
        (count). NaN where no token is left to measure.
    """
    log_weight = prev_logprobs.double() - generation_logprobs.double()
    mask = token_mask.bool()
    finite = mask & torch.isfinite(log_weight)
    gap = log_weight[finite]
    metrics = {
        "abs_gap_mean": gap.abs().mean(),
        "abs_gap_max": gap.abs().max() if gap.numel() else torch.tensor(float("nan")),
        "kl_k1": -gap.mean(),
        "kl_k3": kl_k3(gap).mean(),
        "nonfinite_tokens": mask.sum() - finite.sum(),
    }
    weights = _sequence_weights(log_weight, finite)
    for name, quantile in _QUANTILES.items():
        metrics[f"weight_{name}"] = weights.quantile(quantile) if weights.numel() else torch.tensor(float("nan"))
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def _sequence_weights(log_weight: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(dim=-1)
    means = log_weight.masked_fill(~mask, 0.0).sum(dim=-1) / lengths
    return means[lengths > 0].clamp(max=MAX_LOG_RATIO).exp()
