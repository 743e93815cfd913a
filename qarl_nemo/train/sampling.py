"""Draws tokens from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are drawn.

    Attributes:
        max_new_tokens: budget, tokens.
        temperature: 0 decodes greedily (logprobs are then those at temperature 1).
        top_p: smallest probability mass kept; truncates sampling, not the reported logprobs.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


def draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: [B, V] FP32.
        params: temperature and top-p.
        generator: source of randomness.

    Returns:
        token [B] int64 and its logprob [B] FP32 under the untruncated distribution.
    """
    logprobs = (logits / (params.temperature or 1.0)).log_softmax(-1)
    if params.temperature == 0:
        token = logits.argmax(-1)
    else:
        probabilities = logprobs.exp()
        if params.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            outside = ordered.cumsum(-1) - ordered >= params.top_p
            probabilities = probabilities.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)
        token = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    return token, logprobs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
