"""A mean over independent draws, with its standard error."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over draws: problems, or seeds.

    Attributes:
        value: the mean.
        standard_error: the mean's, over the draws; None of a single draw.
    """

    value: float
    standard_error: float | None


def mean_of(draws: Iterable[float]) -> Estimate:
    """Return the mean and its standard error s / sqrt(n), s^2 = sum_i (x_i - mean)^2 / (n - 1).

    Args:
        draws: one value each; of none the mean is NaN.
    """
    values = list(draws)
    mean = statistics.fmean(values) if values else math.nan
    return Estimate(mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)
