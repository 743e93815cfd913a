"""Soft adaptive policy optimization: a sigmoid gate per token where others clip."""

import torch
from torch import Tensor

from qarl_nemo.losses.config import SAPOConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, compare, loss_output, prox_ratio


def sapo_loss(curr_logprobs: Tensor, data: LossData, config: SAPOConfig) -> LossOutput:
    """Compute L = -mean over responses of mean over tokens of (4 / tau) * sigmoid(tau (r - 1)) * A.

    tau is tau_pos for A > 0 and tau_neg otherwise. The gate's slope is 4 p (1 - p) with p = sigmoid(tau (r - 1)): 1 at
    r = 1 for every tau, less on either side. There is no mismatch weight: this is the published objective.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: the two temperatures.

    Source: arXiv 2511.20347, the soft gate and its objective.
    """
    logs = compare(curr_logprobs, data)
    ratio = prox_ratio(logs.log_prox)
    tau = torch.where(logs.advantages > 0, config.tau_pos, config.tau_neg).to(ratio)
    opening = torch.sigmoid(tau * (ratio - 1.0))
    objective = logs.sequence_mean(4.0 / tau * opening * logs.advantages)
    return loss_output(
        logs,
        units=logs.tokens,
        advantages=logs.advantages,
        loss=logs.sequences.average(-objective),
        kept=opening < 1.0,
        metrics={},
    )
