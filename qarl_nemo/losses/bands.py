"""Bands: the interval of the ratio in which a unit (response or token) has a gradient, by the sign of its advantage.

Every clipped objective here is `weight * clip(r, lower, upper) * A` with bounds that depend on sign(A) only. PPO's
outer min is one such pair of bounds: min(r A, clip(r, 1-l, 1+h) A) = clip(r, 0, 1+h) A for A > 0 and
clip(r, 1-l, inf) A for A < 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_nemo.losses.ratios import (
    LogRatios,
    LossOutput,
    Units,
    capped_fraction,
    loss_output,
    prox_ratio,
    truncated_weight,
)

Bounds = tuple[float | Tensor, float | Tensor]
UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Band:
    """Bounds of the ratio per unit. Units with advantage 0, masked ones among them, are unbounded and in no band.

    Attributes:
        lower: [B] or [B, T].
        upper: like lower.
        positive: bool, advantage > 0.
        negative: bool, advantage < 0.
    """

    lower: Tensor
    upper: Tensor
    positive: Tensor
    negative: Tensor

    @classmethod
    def by_sign(cls, advantages: Tensor, *, positive: Bounds, negative: Bounds = UNBOUNDED) -> "Band":
        """Choose (lower, upper) per unit by the sign of its advantage."""
        above, below = advantages > 0, advantages < 0
        lower, upper = (torch.full_like(advantages, bound) for bound in UNBOUNDED)
        lower = torch.where(above, positive[0], torch.where(below, negative[0], lower))
        upper = torch.where(above, positive[1], torch.where(below, negative[1], upper))
        return cls(lower=lower, upper=upper, positive=above, negative=below)

    def clip(self, ratio: Tensor) -> Tensor:
        """Clip the ratio to its band. Outside the gradient is exactly zero; on a bound it still flows."""
        return ratio.clamp(self.lower, self.upper)

    def contains(self, ratio: Tensor) -> Tensor:
        """Tell where the gradient flows: lower <= ratio <= upper."""
        return (ratio >= self.lower) & (ratio <= self.upper)

    @torch.no_grad()
    def metrics(self, ratio: Tensor, units: Units) -> dict[str, Tensor]:
        """Return, by sign, the shares of all valid units in, below and above the band, and the count in it.

        For shares within one sign, divide by `fraction_<sign>` after adding up all micro-batches.
        """
        places = {"in_band": self.contains(ratio), "below_band": ratio < self.lower, "above_band": ratio > self.upper}
        result = {}
        for sign, has_sign in (("positive", self.positive), ("negative", self.negative)):
            for place, is_there in places.items():
                result[f"{place}_fraction_{sign}"] = units.average(is_there & has_sign)
            result[f"num_in_band_{sign}"] = (places["in_band"] & has_sign).sum()
        return result


def clipped_output(
    logs: LogRatios,
    *,
    units: Units,
    advantages: Tensor,
    ratio: Tensor,
    weight: Tensor | float,
    band: Band,
    metrics: dict[str, Tensor],
) -> LossOutput:
    """Return the output of loss = -(sum over units of weight * clip(ratio) * A) / global count of units.

    Args:
        logs: the compared micro-batch.
        units: responses or tokens.
        advantages: [B] or [B, T], one per unit.
        ratio: like advantages, with a graph.
        weight: like advantages, detached; a unit of weight 0 is dropped but stays in the denominator.
        band: the bounds of `ratio`.
        metrics: the objective's own additive metrics, beside those of the band.
    """
    weight = torch.as_tensor(weight, dtype=ratio.dtype, device=ratio.device)
    return loss_output(
        logs,
        units=units,
        advantages=advantages,
        loss=units.average(-weight * band.clip(ratio) * advantages),
        kept=band.contains(ratio) & (weight > 0),
        metrics=band.metrics(ratio, units) | metrics,
    )


def clipped_tokens(logs: LogRatios, positive: Bounds, negative: Bounds, mismatch_cap: float | None) -> LossOutput:
    """Return the output of loss = -mean over tokens of min(w, C) * clip(r) * A, clipped by the sign of A.

    Args:
        logs: the compared micro-batch.
        positive: bounds of the ratio r where A > 0.
        negative: bounds where A < 0.
        mismatch_cap: C; None: weights of 1.
    """
    return clipped_output(
        logs,
        units=logs.tokens,
        advantages=logs.advantages,
        ratio=prox_ratio(logs.log_prox),
        weight=truncated_weight(logs.log_mismatch, mismatch_cap),
        band=Band.by_sign(logs.advantages, positive=positive, negative=negative),
        metrics=capped_fraction(logs.log_mismatch, mismatch_cap, logs.tokens),
    )
