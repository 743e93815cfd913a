"""Dual-clip GRPO: token-level PPO clip whose negative tokens also stop at an upper line."""

from torch import Tensor

from qarl_nemo.losses.bands import clipped_tokens
from qarl_nemo.losses.config import DualClipGRPOConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, compare


def dual_clip_grpo_loss(curr_logprobs: Tensor, data: LossData, config: DualClipGRPOConfig) -> LossOutput:
    """Compute L = -mean over tokens of min(w, C) * max(min(r A, clip(r) A), c A), the outer max for A < 0 only.

    For A < 0 this is clip(r, 1-clip_low, c) * A. The band acts on single tokens, so tokens conditioned on a dropped
    error token still learn.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: clip lines, the dual clip c and the mismatch cap C.

    Source: arXiv 1912.09729, dual-clip PPO; as a baseline, arXiv 2604.07853 Fig. 8.
    """
    bands = config.bands
    return clipped_tokens(compare(curr_logprobs, data), bands.positive, bands.negative, config.mismatch_cap)
