"""Fidelity: how far a learner's logprobs are from a rollout engine's, over all tokens and by place in the response.

Builds on `mismatch_metrics`: with d = learner - engine of one token that the engine chose, |gap| = |d|, the k3 estimate
of KL(engine || learner) is exp(d) - 1 - d, and a response's ratio is the geometric mean exp(mean_t d_t).
Shapes: B responses, R response tokens.
"""

import torch
from torch import Tensor

from qarl_nemo.metrics.mismatch import mismatch_metrics

_GAP_QUANTILES = {"gap_p50": 0.50, "gap_p90": 0.90, "gap_p99": 0.99}
_CDF_LEVELS = 100
_NAMES = {
    "gap_mean": "abs_gap_mean",
    "gap_max": "abs_gap_max",
    "kl_k3": "kl_k3",
    "ratio_p01": "weight_p01",
    "ratio_p50": "weight_p50",
    "ratio_p99": "weight_p99",
}


def fidelity_metrics(
    learner_logprobs: Tensor, generation_logprobs: Tensor, same_top: Tensor, token_mask: Tensor
) -> dict[str, float]:
    """Measure |gap|, k3 KL, sequence ratios and top-1 agreement over the tokens of a mask.

    Args:
        learner_logprobs: [B, R] logprobs of the engine's tokens under the learner, nats.
        generation_logprobs: [B, R] logprobs of the same tokens under the engine, nats.
        same_top: [B, R] bool, whether both consider the same token the likeliest.
        token_mask: [B, R] bool, true for response tokens.

    Returns:
        gap_mean, gap_p50, gap_p90, gap_p99, gap_max, kl_k3 (nats), ratio_p01, ratio_p50, ratio_p99 of the responses'
        geometric mean ratios, top1_agreement (fraction), num_tokens and nonfinite_tokens (counts). Tokens that are not
        finite are counted and left out of the other figures; NaN where no token is left.
    """
    measured = mismatch_metrics(learner_logprobs, generation_logprobs, token_mask)
    gaps, finite = _gaps(learner_logprobs, generation_logprobs, token_mask)
    metrics = {name: measured[f"mismatch/{source}"] for name, source in _NAMES.items()}
    for name, level in _GAP_QUANTILES.items():
        metrics[name] = float(gaps.quantile(level)) if gaps.numel() else float("nan")
    metrics["top1_agreement"] = float(same_top[finite].double().mean())
    metrics["num_tokens"] = int(token_mask.sum())
    metrics["nonfinite_tokens"] = int(measured["mismatch/nonfinite_tokens"])
    return metrics


def fidelity_by_position(
    learner_logprobs: Tensor,
    generation_logprobs: Tensor,
    same_top: Tensor,
    token_mask: Tensor,
    *,
    max_intervals: int = 16,
) -> list[dict[str, float]]:
    """Measure the same figures for each interval of response positions that holds a token.

    Args:
        learner_logprobs: [B, R], nats.
        generation_logprobs: [B, R], nats.
        same_top: [B, R] bool.
        token_mask: [B, R] bool.
        max_intervals: intervals of equal width at most; a ratio is the geometric mean of a response's tokens inside.

    Returns:
        One dictionary for each interval: `first` and `last` position, from 0, and the figures of `fidelity_metrics`.
    """
    num_positions = token_mask.shape[1]
    width = -(-num_positions // max_intervals)
    rows = []
    for first in range(0, num_positions, width):
        part = slice(first, first + width)
        if bool(token_mask[:, part].any()):
            columns = (learner_logprobs, generation_logprobs, same_top, token_mask)
            figures = fidelity_metrics(*(column[:, part] for column in columns))
            rows.append({"first": first, "last": min(first + width, num_positions) - 1, **figures})
    return rows


def gap_cdf(learner_logprobs: Tensor, generation_logprobs: Tensor, token_mask: Tensor) -> list[float]:
    """Return |gap| at equally spaced quantiles: enough to draw its distribution without keeping the tokens.

    Args:
        learner_logprobs: [B, R], nats.
        generation_logprobs: [B, R], nats.
        token_mask: [B, R] bool.

    Returns:
        101 values from the smallest to the largest gap; empty where no token is left.
    """
    gaps, _ = _gaps(learner_logprobs, generation_logprobs, token_mask)
    levels = torch.linspace(0, 1, _CDF_LEVELS + 1, dtype=gaps.dtype, device=gaps.device)
    return gaps.quantile(levels).tolist() if gaps.numel() else []


def _gaps(learner_logprobs: Tensor, generation_logprobs: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
    difference = learner_logprobs.double() - generation_logprobs.double()
    finite = token_mask.bool() & difference.isfinite()
    return difference[finite].abs(), finite
