"""Ratios between three sets of log-probabilities, masked sums, and the records around every loss.

B is responses in the micro-batch, T predicted tokens.

    prox ratio       r = exp(curr - prev)         learner now over learner at rollout time; carries the gradient
    mismatch weight  w = exp(prev - generation)   learner at rollout time over sampler; detached

Per response both are geometric means over its valid tokens, exp(mean_t log-ratio).

Everything is additive: a loss or metric is a sum over local responses or tokens divided by a *global* count, so the
results of micro-batches and ranks add up to the batch's. A local mean anywhere would make the result depend on how the
batch was split.

Masks are weights, as in NeMo-RL: a response counts `sample_mask` times in sums and, through its global counts, in
denominators. With masks of 0 and 1 this is plain counting.

Masked positions may hold anything (-inf from a rollout engine, NaN from padding). `where` replaces them before any
arithmetic, because 0 * inf is NaN in the backward pass too.

A NaN or infinity on a *valid* token is a fault that must reach the trainer's guard, but a clamp turns an infinite gap
into a finite one and a NaN's gradient into 0. So the log-ratios of a response are multiplied by 1, or by NaN if any of
its values is not finite: the loss and the response's gradients are then NaN for every objective.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to [-20, 20] before exp: e^20 = 4.9e8 times a weight, an advantage and 1e6 tokens stays below
float32's 3.4e38, and no objective has a band, cap or temperature out there."""


@dataclass(frozen=True, slots=True)
class LossData:
    """NeMo-RL's training keys for one micro-batch, already aligned to the predicted token (its `[:, 1:]`).

    Attributes:
        prev_logprobs: [B, T] float32, the learner's aligned forward before the first update of the step.
        generation_logprobs: [B, T] float32, the sampler's.
        advantages: [B, T] float32, constant over a response for group-normalized rewards.
        token_mask: [B, T], 1 on response tokens, 0 elsewhere; values in between weigh a token.
        sample_mask: [B], how much a response counts; 0 leaves it out.
        global_valid_seqs: scalar, the sum of `sample_mask` over the whole optimizer step and all ranks.
        global_valid_toks: scalar, the same sum of `token_mask * sample_mask`.
        entropy: [B, T] float32 in nats, detached; metrics only.
    """

    prev_logprobs: Tensor
    generation_logprobs: Tensor
    advantages: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    global_valid_seqs: Tensor
    global_valid_toks: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """One micro-batch's share of the loss, its additive metrics and per-response values.

    Attributes:
        loss: scalar with a graph; add over micro-batches and ranks. NaN if a valid token held a non-finite value.
        metrics: name -> detached scalar; add over micro-batches and ranks. `num_*` count responses or tokens, whatever
            their weight; all others are already divided by the global count.
        sequences: [B] detached: `prox_ratio` and `mismatch_weight` (geometric means before any cap), `advantage`,
            `length_tokens`, `kept` (bool: some token's gradient is not clipped away) and `valid` (bool).
        logs: the compared micro-batch; its `log_prox` has a graph.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    sequences: dict[str, Tensor]
    logs: "LogRatios"


@dataclass(frozen=True, slots=True)
class Units:
    """What an objective averages over: responses ([B]) or tokens ([B, T]).

    Attributes:
        valid: bool, the units that count.
        weight: float, how much each counts; 0 where masked.
        divisor: scalar float, the sum of weights in the whole step; 1 if that is 0.
    """

    valid: Tensor
    weight: Tensor
    divisor: Tensor

    @classmethod
    def of(cls, weight: Tensor, global_count: Tensor) -> "Units":
        """Build units from their weights and the sum of weights over the whole step, in the weights' dtype."""
        count = global_count.to(weight)
        return cls(weight != 0, weight, torch.where(count > 0, count, 1.0))

    def average(self, values: Tensor) -> Tensor:
        """Sum weight * value over the valid units and divide by the global count."""
        values = values.to(self.weight.dtype)
        return (torch.where(self.valid, values, 0.0) * self.weight).sum() / self.divisor


@dataclass(frozen=True, slots=True)
class LogRatios:
    """A micro-batch with its masked positions neutralized: log-ratios, advantages and entropy are 0 there.

    Attributes:
        log_prox: [B, T] curr - prev, with a graph; NaN throughout a response that holds a non-finite value.
        log_mismatch: [B, T] prev - generation, detached.
        advantages: [B, T].
        entropy: [B, T] or None.
        tokens: the valid tokens, each weighing `token_mask * sample_mask`.
        sequences: the responses that count and have at least one valid token, each weighing `sample_mask`.
        within: [B, T] float, what a valid token weighs within its response: `token_mask`.
        lengths: [B] float, the sum of `within`; 1 for a response without any.
    """

    log_prox: Tensor
    log_mismatch: Tensor
    advantages: Tensor
    entropy: Tensor | None
    tokens: Units
    sequences: Units
    within: Tensor
    lengths: Tensor

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average [B, T] `values` over each response's valid tokens; 0 for a response without any. Returns [B]."""
        return (torch.where(self.tokens.valid, values, 0.0) * self.within).sum(dim=-1) / self.lengths


def compare(curr_logprobs: Tensor, data: LossData) -> LogRatios:
    """Neutralize masked positions and form the log-ratios curr - prev and prev - generation.

    Args:
        curr_logprobs: [B, T] float32 or float64, log-probabilities of the response tokens now, with a graph.
        data: the rest of the micro-batch.

    Raises:
        ValueError: a shape differs from `curr_logprobs` (the `[:, 1:]` alignment was missed, or a batch axis dropped),
            or log-probabilities are narrower than float32, which cannot resolve bands of 3e-4.
    """
    _check(curr_logprobs, data)
    tokens = Units.of((data.token_mask * data.sample_mask.unsqueeze(-1)).to(curr_logprobs), data.global_valid_toks)
    mask = tokens.valid
    responses = torch.where(mask.any(dim=-1), data.sample_mask, 0).to(curr_logprobs)
    within = torch.where(mask, data.token_mask, 0).to(curr_logprobs)
    length = within.sum(dim=-1)
    curr, prev, generation, advantages = (
        torch.where(mask, values, 0.0)
        for values in (
            curr_logprobs,
            data.prev_logprobs.detach(),
            data.generation_logprobs.detach(),
            data.advantages.detach(),
        )
    )
    finite = torch.stack([values.isfinite() for values in (curr, prev, generation, advantages)]).all(dim=0)
    fault = torch.where(finite.all(dim=-1, keepdim=True), 1.0, torch.nan).to(curr)
    return LogRatios(
        log_prox=(curr - prev) * fault,
        log_mismatch=prev - generation,
        advantages=advantages,
        entropy=None if data.entropy is None else torch.where(mask, data.entropy.detach(), 0.0),
        tokens=tokens,
        sequences=Units.of(responses, data.global_valid_seqs),
        within=within,
        lengths=torch.where(length > 0, length, 1.0),
    )


def prox_ratio(log_prox: Tensor) -> Tensor:
    """Return r = exp(log_prox), the log-ratio clamped to +-MAX_LOG_RATIO; keeps the graph. Any shape."""
    return log_prox.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mismatch_weight(log_mismatch: Tensor, cap: float) -> Tensor:
    """Return w_hat = exp(clip(log w, -log cap, +log cap)), detached: the two-sided cap. Any shape.

    Source: arXiv 2604.07853, Eq. 5.
    """
    return log_mismatch.detach().clamp(-math.log(cap), math.log(cap)).exp()


def truncated_weight(log_mismatch: Tensor, cap: float | None) -> Tensor:
    """Return min(w, cap), detached, or 1 without a cap: truncated importance sampling caps the upper side only."""
    if cap is None:
        return torch.ones_like(log_mismatch)
    return log_mismatch.detach().clamp(-MAX_LOG_RATIO, math.log(cap)).exp()


def capped_fraction(log_mismatch: Tensor, cap: float | None, units: Units) -> dict[str, Tensor]:
    """Return the share of units whose weight the cap holds back, log_mismatch > log cap, as one additive metric."""
    if cap is None:
        return {}
    return {"mismatch_capped_fraction": units.average(log_mismatch > math.log(cap))}


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Return k3 = exp(x) - 1 - x >= 0 with x = log p - log q on samples of q, an estimate of KL(q || p) in nats.

    Computed with `expm1`: x is often around 1e-4, where exp(x) - 1 - x in float32 is nothing but rounding.

    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.expm1() - bounded


def loss_output(
    logs: LogRatios, *, units: Units, advantages: Tensor, loss: Tensor, kept: Tensor, metrics: dict[str, Tensor]
) -> LossOutput:
    """Add the metrics that every objective shares.

    Args:
        logs: the compared micro-batch.
        units: what the objective decides on, responses or tokens; sign fractions are shares of these.
        advantages: [B] or [B, T], one per unit.
        loss: scalar, this micro-batch's share.
        kept: bool, one per unit: the gradient of its ratio is not clipped away.
        metrics: the objective's own additive metrics.
    """
    with torch.no_grad():
        sequences = _sequence_values(logs, units.valid & kept & (advantages != 0))
        shared = {
            "total": loss.detach(),
            "kl_k3": logs.tokens.average(kl_k3(logs.log_prox)),
            "mismatch_kl_k3": logs.tokens.average(kl_k3(logs.log_mismatch)),
            "prox_ratio_mean": logs.sequences.average(sequences["prox_ratio"]),
            "mismatch_weight_mean": logs.sequences.average(sequences["mismatch_weight"]),
            "kept_fraction": logs.sequences.average(sequences["kept"]),
            "fraction_positive": units.average(advantages > 0),
            "fraction_negative": units.average(advantages < 0),
            "num_valid_seqs": logs.sequences.valid.sum(),
            "num_valid_toks": logs.tokens.valid.sum(),
        }
        if logs.entropy is not None:
            shared["entropy"] = logs.tokens.average(logs.entropy)
    return LossOutput(loss=loss, metrics=shared | metrics, sequences=sequences, logs=logs)


def _sequence_values(logs: LogRatios, kept_units: Tensor) -> dict[str, Tensor]:
    return {
        "prox_ratio": prox_ratio(logs.sequence_mean(logs.log_prox)),
        "mismatch_weight": prox_ratio(logs.sequence_mean(logs.log_mismatch)),
        "advantage": logs.sequence_mean(logs.advantages),
        "length_tokens": logs.tokens.valid.sum(dim=-1),
        "kept": kept_units if kept_units.ndim == 1 else kept_units.any(dim=-1),
        "valid": logs.sequences.valid,
    }


def _check(curr_logprobs: Tensor, data: LossData) -> None:
    shape = curr_logprobs.shape
    expected = dict.fromkeys(("prev_logprobs", "generation_logprobs", "advantages", "token_mask"), shape)
    expected["sample_mask"] = shape[:1]
    if data.entropy is not None:
        expected["entropy"] = shape
    problems = [] if len(shape) == 2 else [f"curr_logprobs is {list(shape)}, not [B, T]"]
    for name, wanted in expected.items():
        found = getattr(data, name).shape
        if found != wanted:
            problems.append(f"{name} is {list(found)}, not {list(wanted)}")
    logprobs = {
        "curr_logprobs": curr_logprobs,
        "prev_logprobs": data.prev_logprobs,
        "generation_logprobs": data.generation_logprobs,
    }
    for name, values in logprobs.items():
        if values.dtype not in (torch.float32, torch.float64):
            problems.append(f"{name} is {values.dtype}, not float32")
    if problems:
        raise ValueError(
            f"the loss needs log-probabilities aligned to the predicted token, in float32: {'; '.join(problems)}. "
            "Slice NeMo-RL's [B, S] tensors with [:, 1:] and compute log-probabilities in float32."
        )
