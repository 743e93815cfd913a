"""NeMo-RL's KL term, which every objective keeps: beta * KL(learner || reference), estimated on the sampled tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

KL_TYPES = ("k1", "k2", "k3")


def kl_estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """Return an estimate of KL(q || p) from x = log p - log q on samples of q, in nats.

        k1 = -x        k2 = x^2 / 2        k3 = exp(x) - 1 - x

    Args:
        log_ratio: x, any shape.
        kind: `k1`, `k2` or `k3`.

    Returns:
        Like `log_ratio`.

    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    if kind == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if kind == "k2" else log_ratio.expm1() - log_ratio


@dataclass(frozen=True, slots=True)
class ReferenceKL:
    """The keys of NeMo-RL's `loss_fn` block that set the KL term.

    Attributes:
        penalty: `reference_policy_kl_penalty`, 0 for none.
        kind: `reference_policy_kl_type`.
        input_clamp: `kl_input_clamp_value`, the bound on the log-ratio's magnitude; None for no bound.
        output_clamp: `kl_output_clamp_value`, the bound on the estimate's magnitude; None for no bound.
        from_sampler: `use_on_policy_kl_approximation`: weigh tokens by exp(curr - generation) instead of by 1.
    """

    penalty: float
    kind: str
    input_clamp: float | None
    output_clamp: float | None
    from_sampler: bool

    def __post_init__(self) -> None:
        if self.kind not in KL_TYPES:
            raise ValueError(f"loss_fn.reference_policy_kl_type={self.kind!r}; legal: {', '.join(KL_TYPES)}")
        if not self.penalty >= 0:
            raise ValueError(f"loss_fn.reference_policy_kl_penalty={self.penalty}; legal: 0 or more")
        # A bound of 0 or less would hold every token, which would then have no gradient.
        for key, bound in (("kl_input_clamp_value", self.input_clamp), ("kl_output_clamp_value", self.output_clamp)):
            if self.penalty and bound is not None and not bound > 0:
                raise ValueError(f"loss_fn.{key}={bound}; legal: more than 0, or null")

    def per_token(self, curr: Tensor, reference: Tensor, generation: Tensor) -> Tensor:
        """Return beta * weight * estimate of each token, with the gradient of weight and estimate.

        A token's weight is exp(curr - generation) or, without `from_sampler`, 1 with the gradient of curr. A weight
        that is not finite becomes 0, and a token whose log-ratio is clamped has no gradient.

        Args:
            curr: [B, T] log-probabilities with a graph, finite or NaN.
            reference: [B, T] the reference's log-probabilities.
            generation: [B, T] the sampler's log-probabilities.

        Returns:
            [B, T]; NaN where `curr` or `reference` is not finite. Without `input_clamp`, k3 overflows where the two are
            88 nats apart, and its gradient is NaN there whatever `output_clamp` makes of the value.

        Source: arXiv 2506.09477, the gradient through the weights.
        """
        # A clamp would turn an infinity into an ordinary number and a NaN's gradient into 0: see `losses/ratios.py`.
        curr = curr * torch.where(curr.detach().isfinite() & reference.isfinite(), 1.0, torch.nan)
        log_weight = curr - (generation if self.from_sampler else curr.detach())
        # The weight is masked before exp, whose gradient of an infinite weight would be NaN.
        weight = log_weight.masked_fill(~log_weight.detach().exp().isfinite(), -torch.inf).exp()
        log_ratio = reference - curr
        if self.input_clamp is not None:
            held = log_ratio.clamp(-self.input_clamp, self.input_clamp)
            weight = torch.where(held == log_ratio, weight, weight.detach())
            log_ratio = held
        estimate = weight * kl_estimate(log_ratio, self.kind)
        if self.output_clamp is not None:
            estimate = estimate.clamp(-self.output_clamp, self.output_clamp)
        return self.penalty * estimate
