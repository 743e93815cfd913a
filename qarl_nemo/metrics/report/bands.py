"""Clip and cap lines of an objective, as the report draws them over histograms."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qarl_nemo.losses.config import EVERYTHING, Interval, LossConfig, Unit

_ADAPTER: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)


@dataclass(frozen=True, slots=True)
class ObjectiveBands:
    """Where an objective clips.

    Attributes:
        unit: what it takes ratios of: whole responses (geometric mean) or tokens.
        prox: interval of the prox ratio with a gradient, by advantage sign.
        mismatch: interval in which the mismatch weight is used as it is.
    """

    unit: Unit = "response"
    prox: dict[str, Interval] = field(default_factory=lambda: {"positive": EVERYTHING, "negative": EVERYTHING})
    mismatch: Interval = EVERYTHING


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
    bands = config.bands
    prox = {"positive": bands.positive, "negative": bands.negative}
    return ObjectiveBands(config.band_unit, prox, bands.mismatch or EVERYTHING)
