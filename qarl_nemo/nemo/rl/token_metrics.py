"""Mismatch and error tokens as sums that NeMo-RL can add up over micro-batches, ranks and packed sequences."""

import torch
from torch import Tensor

from qarl_nemo.losses.ratios import LossData
from qarl_nemo.metrics.error_tokens import error_token_mask


@torch.no_grad()
def token_metrics(batch: LossData, token_ids: Tensor) -> dict[str, Tensor]:
    """Return sum over this call's tokens / global count of response tokens, for each metric.

    Args:
        batch: the call's responses.
        token_ids: [B, T] the predicted tokens.

    Returns:
        `abs_gap` (mean |prev - generation|, nats); `error_tokens`, and `error_tokens_positive`, `_negative` by the
        sign of the advantage; `tokens_positive`, `_negative`, which turn those into rates within a sign; and the
        count `num_nonfinite_tokens`, left out of the gap.
    """
    valid = (batch.token_mask != 0) & (batch.sample_mask != 0).unsqueeze(-1)
    gap = (batch.prev_logprobs - batch.generation_logprobs).abs()
    finite = valid & gap.isfinite()
    wrong = error_token_mask(batch.prev_logprobs, batch.generation_logprobs, token_ids, valid)
    positive, negative = valid & (batch.advantages > 0), valid & (batch.advantages < 0)
    sums = {
        "abs_gap": torch.where(finite, gap, 0.0).sum(),
        "error_tokens": wrong.sum(),
        "error_tokens_positive": (wrong & positive).sum(),
        "error_tokens_negative": (wrong & negative).sum(),
        "tokens_positive": positive.sum(),
        "tokens_negative": negative.sum(),
    }
    count = batch.global_valid_toks.to(gap).clamp(min=1)
    return {name: value / count for name, value in sums.items()} | {"num_nonfinite_tokens": valid.sum() - finite.sum()}
