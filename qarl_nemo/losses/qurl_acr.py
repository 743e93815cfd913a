"""QuRL's adaptive clipping range: where a weight was truncated, the upper clip line moves out by the same factor."""

import math

from torch import Tensor

from qarl_nemo.losses.bands import Band, clipped_output
from qarl_nemo.losses.config import QuRLACRConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, capped_fraction, compare, prox_ratio, truncated_weight


def qurl_acr_loss(curr_logprobs: Tensor, data: LossData, config: QuRLACRConfig) -> LossOutput:
    """Compute L = -mean over tokens of min(w, C) * min(R A, clip(R, 1-clip_low, (1+clip_high)/rho) A).

    R is the token's prox ratio, w its mismatch weight and rho = min(1, C / w). rho < 1 exactly where the weight is
    truncated, so the upper line is (1+clip_high) * max(1, w / C).

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: clip lines and mismatch cap.

    Source: arXiv 2602.13953, Eq. 9.
    """
    logs = compare(curr_logprobs, data)
    excess = prox_ratio((logs.log_mismatch - math.log(config.mismatch_cap)).clamp(min=0.0))
    return clipped_output(
        logs,
        units=logs.tokens,
        advantages=logs.advantages,
        ratio=prox_ratio(logs.log_prox),
        weight=truncated_weight(logs.log_mismatch, config.mismatch_cap),
        band=Band.by_sign(
            logs.advantages, positive=(0.0, config.bands.positive[1] * excess), negative=config.bands.negative
        ),
        metrics=capped_fraction(logs.log_mismatch, config.mismatch_cap, logs.tokens),
    )
