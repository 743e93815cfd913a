"""Trust-band policy optimization: a whole response is one action, kept or dropped by its own band."""

from torch import Tensor

from qarl_nemo.losses.bands import Band, clipped_output
from qarl_nemo.losses.config import TBPOConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, capped_fraction, compare, mismatch_weight, prox_ratio


def tbpo_loss(curr_logprobs: Tensor, data: LossData, config: TBPOConfig) -> LossOutput:
    """Compute L = -mean over responses of w_hat * r_hat * A, each response kept or dropped whole.

        r_hat = clip(r, 0, 1+eps_h)            if A > 0
                clip(r, 1-delta_l, 1+delta_h)  if A < 0
        w_hat = exp(clip(log w, -log c, +log c)), detached

    r and w are geometric means over the response, A its mean advantage. For A < 0 there is no outer min: a response
    whose ratio rose above 1+delta_h, where PPO keeps the full gradient and error tokens live, gets none. Dropped
    responses stay in the denominator, so dropping does not rescale the others.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: clip lines and mismatch cap.

    Source: arXiv 2604.07853, section 3.2 and Eq. 5.
    """
    logs = compare(curr_logprobs, data)
    advantages = logs.sequence_mean(logs.advantages)
    log_mismatch = logs.sequence_mean(logs.log_mismatch)
    return clipped_output(
        logs,
        units=logs.sequences,
        advantages=advantages,
        ratio=prox_ratio(logs.sequence_mean(logs.log_prox)),
        weight=mismatch_weight(log_mismatch, config.mismatch_cap),
        band=Band.by_sign(advantages, positive=config.bands.positive, negative=config.bands.negative),
        metrics=capped_fraction(log_mismatch.abs(), config.mismatch_cap, logs.sequences),
    )
