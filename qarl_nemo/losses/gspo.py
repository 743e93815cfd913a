"""Group sequence policy optimization: PPO's clip on the geometric-mean ratio of a whole response."""

from torch import Tensor

from qarl_nemo.losses.bands import Band, clipped_output
from qarl_nemo.losses.config import GSPOConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, compare, prox_ratio


def gspo_loss(curr_logprobs: Tensor, data: LossData, config: GSPOConfig) -> LossOutput:
    """Compute L = -mean over responses of min(r A, clip(r, 1-clip_low, 1+clip_high) A).

    r is the response's geometric mean. There is no mismatch weight: this is the published objective. For A < 0 the
    ratio has no upper clip line.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: clip lines.

    Source: arXiv 2507.18071, Eq. 5 and 7.
    """
    logs = compare(curr_logprobs, data)
    advantages = logs.sequence_mean(logs.advantages)
    return clipped_output(
        logs,
        units=logs.sequences,
        advantages=advantages,
        ratio=prox_ratio(logs.sequence_mean(logs.log_prox)),
        weight=1.0,
        band=Band.by_sign(advantages, positive=config.bands.positive, negative=config.bands.negative),
        metrics={},
    )
