"""GRPO with truncated importance sampling: token-level PPO clip, each token corrected for the sampler's mismatch."""

from torch import Tensor

from qarl_nemo.losses.bands import Band, clipped_output
from qarl_nemo.losses.config import GRPOTISConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, capped_fraction, compare, prox_ratio, truncated_weight


def grpo_tis_loss(curr_logprobs: Tensor, data: LossData, config: GRPOTISConfig) -> LossOutput:
    """Compute L = -mean over tokens of min(w, C) * min(r A, clip(r, 1-eps_low, 1+eps_high) A).

    Without a cap the weights are 1: PPO that takes the engine's policy for the learner's.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: clip lines and mismatch cap.

    Source: PPO clip, arXiv 1707.06347 Eq. 7; clip-higher and the token mean, arXiv 2503.14476 section 3; truncation,
        github.com/yaof20/Flash-RL.
    """
    logs = compare(curr_logprobs, data)
    return clipped_output(
        logs,
        units=logs.tokens,
        advantages=logs.advantages,
        ratio=prox_ratio(logs.log_prox),
        weight=truncated_weight(logs.log_mismatch, config.mismatch_cap),
        band=Band.by_sign(logs.advantages, positive=config.bands.positive, negative=config.bands.negative),
        metrics=capped_fraction(logs.log_mismatch, config.mismatch_cap, logs.tokens),
    )
