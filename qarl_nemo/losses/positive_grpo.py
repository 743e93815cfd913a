"""Positive-only GRPO: responses no better than their group teach nothing."""

import torch
from torch import Tensor

from qarl_nemo.losses.bands import Band, clipped_output
from qarl_nemo.losses.config import PositiveGRPOConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, capped_fraction, compare, prox_ratio, truncated_weight


def positive_grpo_loss(curr_logprobs: Tensor, data: LossData, config: PositiveGRPOConfig) -> LossOutput:
    """Compute L = -mean over tokens of min(w, C) * min(r, 1+clip_high) * max(A, 0).

    Tokens with A <= 0 have no gradient and stay in the denominator.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: upper clip line and mismatch cap.

    Source: arXiv 2604.07853, Fig. 8 (baseline); the clip, arXiv 1707.06347 Eq. 7.
    """
    logs = compare(curr_logprobs, data)
    # Clamped advantages leave no negative tokens, so the band and its metrics cover positive ones only.
    learned = logs.advantages.clamp(min=0.0)
    weight = truncated_weight(logs.log_mismatch, config.mismatch_cap)
    return clipped_output(
        logs,
        units=logs.tokens,
        advantages=logs.advantages,
        ratio=prox_ratio(logs.log_prox),
        weight=torch.where(learned > 0, weight, 0.0),
        band=Band.by_sign(learned, positive=config.bands.positive),
        metrics=capped_fraction(logs.log_mismatch, config.mismatch_cap, logs.tokens),
    )
