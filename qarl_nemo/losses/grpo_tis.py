"""GRPO with truncated importance sampling: token-level PPO clip, each token corrected for the sampler's mismatch."""

from torch import Tensor

from qarl_nemo.losses.bands import clipped_tokens
from qarl_nemo.losses.config import GRPOTISConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, compare


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
    bands = config.bands
    return clipped_tokens(compare(curr_logprobs, data), bands.positive, bands.negative, config.mismatch_cap)
