"""Accuracy over several answers to each problem, with standard errors over problems."""

import math
import statistics
from collections.abc import Sequence

from qarl_nemo.metrics.estimate import Estimate, mean_of


def avg_at_k(num_right: Sequence[int], num_samples: int) -> Estimate:
    """Return avg@k: the mean share of right answers, mean_i c_i / k.

    Args:
        num_right: c_i right answers to each problem.
        num_samples: k answers to each.

    Returns:
        The mean; problems are the independent draws, so the standard error is that of their shares.
    """
    return mean_of([right / num_samples for right in num_right])


def pass_at_k(num_right: Sequence[int], num_samples: int, k: int) -> Estimate:
    """Return pass@k, the probability that one of k answers is right: mean_i 1 - C(n - c_i, k) / C(n, k).

    Args:
        num_right: c_i right answers to each problem.
        num_samples: n answers to each.
        k: at most n.

    Source: Chen et al., arXiv 2107.03374, equation 1.
    """
    ways = math.comb(num_samples, k)
    return mean_of([1 - math.comb(num_samples - right, k) / ways for right in num_right])


def reported_ks(num_samples: int) -> list[int]:
    """Return the k for which pass@k is reported: the powers of two up to the number of answers, and that number."""
    return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of several benchmarks, each with the same weight.

    Returns:
        The mean and its standard error, sqrt(sum_b se_b^2) / B; None if one of them has none.
    """
    errors = [one.standard_error for one in estimates if one.standard_error is not None]
    whole = len(errors) == len(estimates)
    value = statistics.fmean(one.value for one in estimates)
    return Estimate(value, math.hypot(*errors) / len(estimates) if whole else None)
