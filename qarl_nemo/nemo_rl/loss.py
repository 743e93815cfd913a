"""The objectives as NeMo-RL's loss function: what its policy workers call and its training loop reads.

It does not import NeMo-RL. Everything it needs is reached through the loss that NeMo-RL's `setup` made: the settings,
and one member of each enumeration, which leads to the others.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from qarl_nemo.losses.build import build_loss
from qarl_nemo.losses.config import LossConfig
from qarl_nemo.losses.nemo_metrics import nemo_metrics
from qarl_nemo.losses.nonfinite import NonFinite, first_nonfinite
from qarl_nemo.losses.ratios import LogRatios, LossData
from qarl_nemo.losses.reference_kl import ReferenceKL
from qarl_nemo.metrics.error_tokens import error_token_mask
from qarl_nemo.nemo_rl.recording import Recording

PREFIX = "qarl/"
"""Prefix of our metrics' names; NeMo-RL's loggers put `train/` in front of it."""
RESPONSE_KEY = "qarl_response"
"""Our own training key, [B] int64: which of the step's responses each row is."""

ENTROPY_KEY = "qarl_entropy"
"""Our own loss input, scalar float32: the mean entropy of the call's response tokens, nats; in recorded steps alone."""

TokenMetrics = Callable[[LossData, Tensor], dict[str, Tensor]]

_PER_TOKEN = ("kl_k3", "mismatch_kl_k3", "entropy")
_PER_SEQUENCE = ("prox_ratio_mean", "mismatch_weight_mean", "kept_fraction", "mismatch_rejected_fraction")


class ClippedLoss(Protocol):
    """The attributes of NeMo-RL's `ClippedPGLossFn` that are read here."""

    input_type: Enum
    loss_type: Enum
    metric_normalizations: Mapping[str, Enum]
    use_fused_linear_logprobs: bool
    force_on_policy_ratio: bool
    use_on_policy_kl_approximation: bool
    reference_policy_kl_penalty: float
    reference_policy_kl_type: str
    kl_input_clamp_value: float | None
    kl_output_clamp_value: float | None
    ratio_clip_min: float
    ratio_clip_max: float


class QarlLossFn:
    """One of our objectives in NeMo-RL's loop: L = L_objective + beta * KL(learner || reference).

    It replaces the loss that NeMo-RL's `setup` built from `loss_fn`, and keeps that loss's KL term, averaged as the
    objective averages, and all its metrics under their names. The loss and all metrics are this call's sums divided by
    global counts, so they add up over micro-batches, ranks and packed sequences.

    Args:
        objective: which objective, with its settings.
        replaced: NeMo-RL's own loss, as `setup` returned it.
        token_metrics: further additive metrics of the response tokens, from the batch and its token ids [B, T].

    Attributes:
        nonfinite: for each call whose loss was not finite, the first value that was not; None if all were.
        recording: collects what reports draw, in a step that is recorded.
    """

    def __init__(self, objective: LossConfig, replaced: ClippedLoss, token_metrics: TokenMetrics | None = None) -> None:
        self.objective = objective
        by_response = objective.averages == "response"
        self.input_type = replaced.input_type
        self.loss_type = type(replaced.loss_type)("sequence_level" if by_response else "token_level")
        self.reference_policy_kl_penalty = replaced.reference_policy_kl_penalty
        self.use_fused_linear_logprobs = replaced.use_fused_linear_logprobs
        self.nonfinite: list[NonFinite | None] = []
        self.recording: Recording | None = None
        self._loss = build_loss(objective)
        self._token_metrics = token_metrics
        self._by_response = by_response
        self._on_policy = replaced.force_on_policy_ratio
        self._clip = (1.0 - replaced.ratio_clip_min, 1.0 + replaced.ratio_clip_max)
        self._kl = ReferenceKL(
            penalty=replaced.reference_policy_kl_penalty,
            kind=replaced.reference_policy_kl_type,
            input_clamp=replaced.kl_input_clamp_value,
            output_clamp=replaced.kl_output_clamp_value,
            from_sampler=replaced.use_on_policy_kl_approximation,
        )
        self.metric_normalizations = self._normalizations(replaced.metric_normalizations)

    def __call__(
        self, next_token_logprobs: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute this call's share of the loss.

        Args:
            next_token_logprobs: [B, S - 1] float32, with a graph.
            data: NeMo-RL's training keys, [B, S] or [B].
            global_valid_seqs: scalar, sum of `sample_mask` in the optimizer step over all ranks.
            global_valid_toks: scalar, the same for response tokens.

        Returns:
            The loss, a scalar; its metrics, additive except NeMo-RL's own minima and maxima.
        """
        batch = self._batch(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        output = self._loss(next_token_logprobs, batch)
        logs = output.logs
        loss, zero = output.loss, next_token_logprobs.new_zeros(())
        penalty = zero
        if self._kl.penalty:
            penalty = self._reference_kl(logs, next_token_logprobs, data, batch)
            loss = loss + penalty
        with torch.no_grad():
            values = {"loss": loss, "kl_penalty": penalty / (self._kl.penalty or 1.0)}
            values |= nemo_metrics(
                logs,
                next_token_logprobs.detach(),
                batch.generation_logprobs,
                kl_type=self._kl.kind,
                clip=self._clip,
            )
            values |= {"num_valid_samples": batch.sample_mask.sum(), "positive_nll_loss": zero}
            values |= {PREFIX + name: value for name, value in self._own_metrics(output.metrics, batch, data).items()}
        # A single transfer from the device for all metrics.
        numbers = torch.stack([value.detach().to(zero.dtype) for value in values.values()]).tolist()
        metrics = dict(zip(values, numbers, strict=True))
        if self.recording is not None:
            self._record(
                self.recording, output.sequences, next_token_logprobs.detach(), batch, data["input_ids"][:, 1:]
            )
        if not math.isfinite(metrics["loss"]):
            self.nonfinite.append(self._first_nonfinite(next_token_logprobs, data, batch, logs))
        return loss, metrics

    @staticmethod
    def _record(
        recording: Recording, sequences: Mapping[str, Tensor], curr: Tensor, batch: LossData, token_ids: Tensor
    ) -> None:
        error_mask = error_token_mask(batch.prev_logprobs, batch.generation_logprobs, token_ids, batch.token_mask)
        recording.collector.add(
            sequences,
            prev_logprobs=batch.prev_logprobs,
            curr_logprobs=curr,
            generation_logprobs=batch.generation_logprobs,
            advantages=batch.advantages,
            token_mask=batch.token_mask,
            error_mask=error_mask,
        )

    def _batch(
        self, next_token_logprobs: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> LossData:
        token_mask, entropy = data["token_mask"][:, 1:], data.get(ENTROPY_KEY)
        # On-policy mode skips the prev forward; detached current logprobs stand in.
        return LossData(
            prev_logprobs=next_token_logprobs.detach() if self._on_policy else data["prev_logprobs"][:, 1:],
            generation_logprobs=data["generation_logprobs"][:, 1:],
            advantages=data["advantages"][:, 1:],
            token_mask=token_mask,
            sample_mask=data["sample_mask"],
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            # Every token stands for the mean, so that the metric's average is that of the tokens' own.
            entropy=None if entropy is None else entropy.expand(token_mask.shape),
        )

    def _reference_kl(self, logs: LogRatios, curr: Tensor, data: Mapping[str, Any], batch: LossData) -> Tensor:
        # If top-k or top-p filters the logprobs, NeMo-RL keeps those over the whole vocabulary for this term.
        curr = data.get("curr_logprobs_unfiltered", curr)
        curr, reference, generation = (
            torch.where(logs.tokens.valid, values, 0.0)
            for values in (curr, data["reference_policy_logprobs"][:, 1:], batch.generation_logprobs)
        )
        per_token = self._kl.per_token(curr, reference, generation)
        if self._by_response:
            return logs.sequences.average(logs.sequence_mean(per_token))
        return logs.tokens.average(per_token)

    def _own_metrics(
        self, metrics: Mapping[str, Tensor], batch: LossData, data: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        ours = {name: value for name, value in metrics.items() if name != "total"}
        return ours | (self._token_metrics(batch, data["input_ids"][:, 1:]) if self._token_metrics else {})

    def _first_nonfinite(
        self, curr: Tensor, data: Mapping[str, Any], batch: LossData, logs: LogRatios
    ) -> NonFinite | None:
        values = {
            "curr_logprobs": curr,
            "prev_logprobs": batch.prev_logprobs,
            "generation_logprobs": batch.generation_logprobs,
            "advantages": batch.advantages,
        }
        if self._kl.penalty:
            values["reference_policy_logprobs"] = data["reference_policy_logprobs"][:, 1:]
        rows = torch.arange(len(curr), device=curr.device)
        return first_nonfinite(values, logs.tokens.valid, data.get(RESPONSE_KEY, rows))

    def _normalizations(self, theirs: Mapping[str, Enum]) -> dict[str, Enum]:
        kinds = type(theirs["loss"])
        tokens, sequences, plain = kinds("tokens"), kinds("sequences"), kinds("none")

        def normalizer(name: str) -> Enum:
            if name.startswith("num_"):
                return plain
            if name in _PER_SEQUENCE:
                return sequences
            of_bands = name not in (*_PER_TOKEN, *of_tokens)
            return sequences if of_bands and self.objective.band_unit == "response" else tokens

        one, token = torch.ones(()), torch.zeros(1, 1)
        batch = LossData(token, token, token, token, torch.zeros(1), one, one, entropy=token)
        of_tokens = self._token_metrics(batch, token.long()) if self._token_metrics else {}
        names = {*self._loss(token, batch).metrics, *of_tokens} - {"total"}
        like_gradient = sequences if self._by_response else tokens
        return {
            **theirs,
            "loss": like_gradient,
            "kl_penalty": like_gradient,
            **{PREFIX + name: normalizer(name) for name in names},
        }
