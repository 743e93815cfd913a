"""On-policy GRPO: one update per rollout batch, so the ratio is 1 and only its gradient matters."""

import torch
from torch import Tensor

from qarl_nemo.losses.config import OnPolicyGRPOConfig
from qarl_nemo.losses.ratios import LossData, LossOutput, capped_fraction, compare, loss_output, truncated_weight


def on_policy_grpo_loss(curr_logprobs: Tensor, data: LossData, config: OnPolicyGRPOConfig) -> LossOutput:
    """Compute L = -mean over tokens of min(w, C) * exp(curr - stop_gradient(curr)) * A.

    This is the policy gradient of the learner that produced `prev_logprobs`. A second update on the same rollouts is
    biased; the metric `kl_k3` (curr against prev), zero on the first update, shows by how much.

    Args:
        curr_logprobs: [B, T] float32, with a graph.
        data: the micro-batch.
        config: mismatch cap.

    Source: arXiv 2604.07853, Fig. 8 (baseline).
    """
    logs = compare(curr_logprobs, data)
    weight = truncated_weight(logs.log_mismatch, config.mismatch_cap)
    ratio = (logs.log_prox - logs.log_prox.detach()).exp()
    return loss_output(
        logs,
        units=logs.tokens,
        advantages=logs.advantages,
        loss=logs.tokens.average(-weight * ratio * logs.advantages),
        kept=torch.ones_like(logs.tokens.valid),
        metrics=capped_fraction(logs.log_mismatch, config.mismatch_cap, logs.tokens),
    )
