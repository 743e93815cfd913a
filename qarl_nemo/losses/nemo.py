"""The objectives as NeMo-RL's loss function: what its policy workers call and its training loop reads."""

import copy
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.losses.build import build_loss
from qarl_nemo.losses.config import LossConfig
from qarl_nemo.losses.ratios import LossData

if importlib.util.find_spec("nemo_rl") is None:
    raise ImportError(
        "qarl_nemo.losses.nemo needs NeMo-RL: clone https://github.com/NVIDIA-NeMo/RL and put its folder on PYTHONPATH"
    )

# isort: split
from nemo_rl.algorithms.loss.interfaces import LossFunction, LossInputType, LossType, MetricNormalizer
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn

PREFIX = "qarl/"
"""Before the name of every metric of ours; NeMo-RL's loggers put `train/` in front of it."""

TokenMetrics = Callable[[LossData, Tensor], dict[str, Tensor]]

# Objectives that average over responses, and those whose bands hold whole responses; the others go by tokens.
_SEQUENCE_LOSSES = ("tbpo", "gspo", "mis_gspo", "sapo")
_SEQUENCE_BANDS = ("tbpo", "gspo", "mis_gspo")
_PER_TOKEN = ("kl_k3", "mismatch_kl_k3")
_PER_SEQUENCE = ("prox_ratio_mean", "mismatch_weight_mean", "kept_fraction", "mismatch_rejected_fraction")


class QarlLossFn(LossFunction):
    """One of our objectives in NeMo-RL's loop: L = L_objective + beta * KL(learner || reference).

    It wraps the loss that NeMo-RL's `setup` made of `loss_fn`. That one keeps defining the KL term, averaged as the
    objective averages, and every metric the loop indexes; its own clipped loss is dropped. The loss and all metrics
    are sums over what the call holds divided by global counts, so they add up over micro-batches, ranks and packed
    sequences.

    Args:
        objective: which objective, with its settings.
        replaced: NeMo-RL's own loss, as `setup` returned it.
        token_metrics: further additive metrics of the response tokens, from the batch and its token ids [B, T].
    """

    input_type = LossInputType.LOGPROB

    def __init__(
        self, objective: LossConfig, replaced: ClippedPGLossFn, token_metrics: TokenMetrics | None = None
    ) -> None:
        self.objective = objective
        self.loss_type = LossType.SEQUENCE_LEVEL if objective.objective in _SEQUENCE_LOSSES else LossType.TOKEN_LEVEL
        self.reference_policy_kl_penalty = replaced.reference_policy_kl_penalty
        self.use_fused_linear_logprobs = replaced.use_fused_linear_logprobs
        self._loss = build_loss(objective)
        self._token_metrics = token_metrics
        self._replaced = replaced
        self._kl = _kl_alone(replaced, self.loss_type)
        self.metric_normalizations = self._normalizations()

    def __call__(
        self, next_token_logprobs: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute this call's share of the loss.

        Args:
            next_token_logprobs: [B, S - 1] float32, with a graph.
            data: NeMo-RL's training keys, [B, S] or [B].
            global_valid_seqs: scalar, responses of the optimizer step over all ranks.
            global_valid_toks: scalar, their response tokens.

        Returns:
            The loss, a scalar; its metrics, additive except NeMo-RL's own minima and maxima.
        """
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        batch = self._batch(next_token_logprobs, data, counts)
        output = self._loss(next_token_logprobs, batch)
        with torch.no_grad():
            _, metrics = self._replaced(next_token_logprobs, data, **counts)
            ours = {name: value for name, value in output.metrics.items() if name != "total"}
            if self._token_metrics is not None:
                ours |= self._token_metrics(batch, data["input_ids"][:, 1:])
        loss = output.loss
        if self.reference_policy_kl_penalty:
            unrewarded = {**data, "advantages": torch.zeros_like(data["advantages"])}
            penalty, _ = self._kl(next_token_logprobs, unrewarded, **counts)
            loss = loss + penalty
            metrics["kl_penalty"] = penalty.item() / self.reference_policy_kl_penalty
        # One transfer from the device for all of them.
        values = torch.stack([value.detach().double() for value in [loss, *ours.values()]]).tolist()
        metrics["loss"] = values[0]
        return loss, metrics | dict(zip((PREFIX + name for name in ours), values[1:], strict=True))

    def _batch(self, next_token_logprobs: Tensor, data: Mapping[str, Any], counts: dict[str, Tensor]) -> LossData:
        # Without the forward that computes them, the update's own log-probabilities are the first ones.
        on_policy = self._replaced.force_on_policy_ratio
        return LossData(
            prev_logprobs=next_token_logprobs.detach() if on_policy else data["prev_logprobs"][:, 1:],
            generation_logprobs=data["generation_logprobs"][:, 1:],
            advantages=data["advantages"][:, 1:],
            token_mask=data["token_mask"][:, 1:],
            sample_mask=data["sample_mask"],
            **counts,
        )

    def _normalizations(self) -> dict[str, MetricNormalizer]:
        def normalizer(name: str) -> MetricNormalizer:
            if name.startswith("num_"):
                return MetricNormalizer.NONE
            if name in _PER_SEQUENCE:
                return MetricNormalizer.SEQUENCES
            by_response = self.objective.objective in _SEQUENCE_BANDS and name not in (*_PER_TOKEN, *of_tokens)
            return MetricNormalizer.SEQUENCES if by_response else MetricNormalizer.TOKENS

        one, token = torch.ones(()), torch.zeros(1, 1)
        batch = LossData(token, token, token, token, torch.zeros(1), one, one)
        of_tokens = self._token_metrics(batch, token.long()) if self._token_metrics is not None else {}
        names = {*self._loss(token, batch).metrics, *of_tokens} - {"total"}
        like_gradient = (
            MetricNormalizer.SEQUENCES if self.loss_type is LossType.SEQUENCE_LEVEL else MetricNormalizer.TOKENS
        )
        return {
            **self._replaced.metric_normalizations,
            "loss": like_gradient,
            "kl_penalty": like_gradient,
            **{PREFIX + name: normalizer(name) for name in names},
        }


def _kl_alone(replaced: ClippedPGLossFn, loss_type: LossType) -> ClippedPGLossFn:
    """Return a loss that is the KL term alone wherever advantages are zero, averaged as `loss_type` says."""
    alone = copy.copy(replaced)
    # A ratio could overflow, and infinity times a zero advantage is NaN.
    alone.disable_ppo_ratio, alone.force_on_policy_ratio = True, False
    alone.loss_type = loss_type
    return alone
