"""Mismatch and error tokens as sums that NeMo-RL can add up over micro-batches, ranks and packed sequences."""

import torch
from torch import Tensor

from qarl_nemo.losses.ratios import LossData, Units
from qarl_nemo.metrics.error_tokens import error_token_mask


@torch.no_grad()
def token_metrics(batch: LossData, token_ids: Tensor) -> dict[str, Tensor]:
    """Return weighted sum over this call's tokens / global count of response tokens, for each metric.

    Args:
        batch: the call's responses.
        token_ids: [B, T] the predicted tokens.

    Returns:
        `abs_gap` (mean |prev - generation|, nats); `error_tokens`, and `error_tokens_positive`, `_negative` by the
        sign of the advantage; `tokens_positive`, `_negative`, which turn those into rates within a sign; and the
        count `num_nonfinite_tokens`, left out of the gap.
    """
    weight = batch.token_mask * batch.sample_mask.unsqueeze(-1)
    valid = weight != 0
    gap = (batch.prev_logprobs - batch.generation_logprobs).abs()
    finite = valid & gap.isfinite()
    wrong = error_token_mask(batch.prev_logprobs, batch.generation_logprobs, token_ids, valid)
    positive, negative = valid & (batch.advantages > 0), valid & (batch.advantages < 0)
    values = {
        "abs_gap": torch.where(finite, gap, 0.0),
        "error_tokens": wrong,
        "error_tokens_positive": wrong & positive,
        "error_tokens_negative": wrong & negative,
        "tokens_positive": positive,
        "tokens_negative": negative,
    }
    tokens = Units.of(weight.to(gap), batch.global_valid_toks)
    averages = {name: tokens.average(value) for name, value in values.items()}
    return averages | {"num_nonfinite_tokens": valid.sum() - finite.sum()}
