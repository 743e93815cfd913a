"""Fidelity: how far a learner's logprobs are from a rollout engine's, over all tokens and by place in the response.

Builds on `mismatch_metrics`: with d = learner - engine of one token that the engine chose, |gap| = |d|, the k3 estimate
of KL(engine || learner) is exp(d) - 1 - d, and a response's ratio is the geometric mean exp(mean_t d_t).
Shapes: B responses, R response tokens.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from qarl_nemo.metrics.mismatch import mismatch_metrics

_GAP_QUANTILES = {"gap_p50": 0.50, "gap_p90": 0.90, "gap_p99": 0.99}
_CDF_LEVELS = 100
_NAMES = {
    "gap_mean": "abs_gap_mean",
    "gap_max": "abs_gap_max",
    "kl_k3": "kl_k3",
    "ratio_p01": "weight_p01",
    "ratio_p50": "weight_p50",
    "ratio_p99": "weight_p99",
}


@dataclass(frozen=True, slots=True)
class Scores:
    """Two policies' logprobs of the tokens of B responses.

    Attributes:
        logprobs: [B, R], from the model that is compared with the engine, at temperature 1, nats.
        generation_logprobs: [B, R], from the engine as it sampled, nats.
        same_top: [B, R] bool, whether both consider the same token the likeliest.
        mask: [B, R] bool, where a response has a token.
    """

    logprobs: Tensor
    generation_logprobs: Tensor
    same_top: Tensor
    mask: Tensor

    def metrics(self) -> dict[str, float]:
        """Measure |gap|, k3 KL, sequence ratios and top-1 agreement over the tokens of the mask.

        Returns:
            gap_mean, gap_p50, gap_p90, gap_p99, gap_max, kl_k3 (nats), ratio_p01, ratio_p50, ratio_p99 of the
            responses' geometric mean ratios, top1_agreement (fraction), num_tokens and nonfinite_tokens (counts).
            Tokens that are not finite are counted and left out of the other figures; NaN where no token is left.
        """
        measured = mismatch_metrics(self.logprobs, self.generation_logprobs, self.mask)
        gaps, finite = self._gaps()
        metrics = {name: measured[f"mismatch/{source}"] for name, source in _NAMES.items()}
        for name, level in _GAP_QUANTILES.items():
            metrics[name] = float(_quantiles(gaps, level)) if gaps.numel() else float("nan")
        metrics["top1_agreement"] = float(self.same_top[finite].double().mean())
        metrics["num_tokens"] = int(self.mask.sum())
        metrics["nonfinite_tokens"] = int(measured["mismatch/nonfinite_tokens"])
        return metrics

    def by_position(self, max_intervals: int = 16) -> list[dict[str, float]]:
        """Measure the same figures for each interval of response positions that holds a token.

        Args:
            max_intervals: intervals of equal width at most; a ratio is the geometric mean of a response's tokens
                inside.

        Returns:
            One dictionary for each interval: `first` and `last` position, from 0, and the figures of `metrics`.
        """
        num_positions = self.mask.shape[1]
        width = -(-num_positions // max_intervals)
        rows = []
        for first in range(0, num_positions, width):
            columns = (self.logprobs, self.generation_logprobs, self.same_top, self.mask)
            part = Scores(*(column[:, first : first + width] for column in columns))
            if bool(part.mask.any()):
                rows.append({"first": first, "last": min(first + width, num_positions) - 1, **part.metrics()})
        return rows

    def gap_cdf(self) -> list[float]:
        """Return |gap| at equally spaced quantiles: enough to draw its distribution without keeping the tokens.

        Returns:
            101 values from the smallest to the largest gap; empty where no token is left.
        """
        gaps, _ = self._gaps()
        return _quantiles(gaps, np.linspace(0, 1, _CDF_LEVELS + 1)).tolist() if gaps.numel() else []

    def _gaps(self) -> tuple[Tensor, Tensor]:
        difference = self.logprobs.double() - self.generation_logprobs.double()
        finite = self.mask & difference.isfinite()
        return difference[finite].abs(), finite


def _quantiles(values: Tensor, levels: float | np.ndarray) -> np.ndarray:
    # torch.quantile takes 2^24 values at most.
    return np.quantile(values.cpu().numpy(), levels)
