"""GSPO with masked importance sampling: a response far from the sampler's distribution is rejected whole."""

import torch
from torch import Tensor

from qarl_nemo.losses.bands import Band, clipped_output
from qarl_nemo.losses.config import MISGSPOConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, compare, prox_ratio


def mis_gspo_loss(curr_logprobs: Tensor, data: LossData, config: MISGSPOConfig) -> LossOutput:
    """Compute L = -mean over responses of 1[low <= w <= high] * w * min(r A, clip(r, 1-clip_low, 1+clip_high) A).

    r and w are geometric means over the response, w detached. Rejected responses stay in the denominator.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: clip lines and the band of the mismatch weight.

    Source: the clip, arXiv 2507.18071 Eq. 5; the baseline, arXiv 2604.07853 Fig. 8, which gives no band: 0.999 to 1.002
        are the reference bounds NeMo-RL documents for rejection by geometric mean (`seq-mask-tis`).
    """
    logs = compare(curr_logprobs, data)
    advantages = logs.sequence_mean(logs.advantages)
    mismatch = prox_ratio(logs.sequence_mean(logs.log_mismatch))
    accepted = (mismatch >= config.mismatch_low) & (mismatch <= config.mismatch_high)
    return clipped_output(
        logs,
        units=logs.sequences,
        advantages=advantages,
        ratio=prox_ratio(logs.sequence_mean(logs.log_prox)),
        weight=torch.where(accepted, mismatch, 0.0),
        band=Band.by_sign(advantages, positive=config.bands.positive, negative=config.bands.negative),
        metrics={"mismatch_rejected_fraction": logs.sequences.average(~accepted)},
    )
