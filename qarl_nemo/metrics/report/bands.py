"""Clip and cap lines of an objective, as the report draws them over histograms."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from qarl_nemo.losses import config as losses

Interval = tuple[float, float]
_EVERYTHING: Interval = (0.0, math.inf)
_ADAPTER: TypeAdapter[Any] = TypeAdapter(losses.LossConfig)


@dataclass(frozen=True, slots=True)
class ObjectiveBands:
    """Where an objective clips.

    Attributes:
        unit: what it takes ratios of: whole responses (geometric mean) or tokens.
        prox: interval of the prox ratio with a gradient, by advantage sign.
        mismatch: interval in which the mismatch weight is used as it is.
    """

    unit: Literal["response", "token"] = "response"
    prox: dict[str, Interval] = field(default_factory=lambda: {"positive": _EVERYTHING, "negative": _EVERYTHING})
    mismatch: Interval = _EVERYTHING


def objective_bands(loss_fn: Any) -> ObjectiveBands | None:
    """Derive the band and cap lines from a run's `loss_fn` block.

    Args:
        loss_fn: mapping with `objective` and its settings; left-out settings have the objective's defaults.

    Returns:
        The lines, infinite where the objective has none; None for a block this version does not know.
    """
    try:
        config = _ADAPTER.validate_python(loss_fn)
    except ValidationError:
        return None
    return _BANDS[type(config)](config)


def _sign(positive_high: float = math.inf, negative: Interval = _EVERYTHING) -> dict[str, Interval]:
    return {"positive": (0.0, positive_high), "negative": negative}


def _ppo(config: Any) -> dict[str, Interval]:
    return _sign(1 + config.clip_high, (1 - config.clip_low, getattr(config, "dual_clip", math.inf)))


def _tbpo(config: losses.TBPOConfig) -> ObjectiveBands:
    negative = (1 - config.negative_clip_low, 1 + config.negative_clip_high)
    cap = config.mismatch_cap
    return ObjectiveBands("response", _sign(1 + config.positive_clip_high, negative), (1 / cap, cap))


_BANDS: dict[type, Callable[[Any], ObjectiveBands]] = {
    losses.TBPOConfig: _tbpo,
    losses.GSPOConfig: lambda own: ObjectiveBands("response", _ppo(own)),
    losses.MISGSPOConfig: lambda own: ObjectiveBands("response", _ppo(own), (own.mismatch_low, own.mismatch_high)),
    losses.GRPOTISConfig: lambda own: ObjectiveBands("token", _ppo(own), (0.0, own.mismatch_cap or math.inf)),
    losses.QuRLACRConfig: lambda own: ObjectiveBands("token", _ppo(own), (0.0, own.mismatch_cap)),
    losses.DualClipGRPOConfig: lambda own: ObjectiveBands("token", _ppo(own), (0.0, own.mismatch_cap)),
    losses.PositiveGRPOConfig: lambda own: ObjectiveBands("token", _sign(1 + own.clip_high), (0.0, own.mismatch_cap)),
    losses.OnPolicyGRPOConfig: lambda own: ObjectiveBands("token", mismatch=(0.0, own.mismatch_cap)),
    losses.SAPOConfig: lambda _: ObjectiveBands("token"),
}
