"""Error tokens: the garbled and repetitive tokens that quantization noise leaves in long generations.

The paper describes them as clusters of repetitive or garbled tokens at very low probability under both policies, rare
in positive samples and common in negative ones. Here a response token is an error token if

1. it is *garbled*: its probability is below `max_prob` under the learner (prev) AND the rollout engine (generation).
   One policy alone is a mismatch, not an error: both engines must find the token implausible. At 1e-3 an absolute
   change of 2e-4 already leaves a +-20 % ratio band, and a policy that samples from its own distribution draws such
   tokens exactly as often as its tail mass below 1e-3, which is small where the distribution is peaked; or
2. it is *repetitive*: it lies in a run in which one n-gram (n <= `max_ngram`) stands at least `min_repeats` times in
   a row, the run being at least `min_run_tokens` long. A model grows confident in its loops, so rule 1 misses them.
   The length bound keeps honest short repetitions (the zeros of 10000, a row of dashes) out.

Shapes: B sequences, T predicted tokens.
"""

import torch
from torch import Tensor


def error_token_mask(
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
    token_ids: Tensor,
    token_mask: Tensor,
    *,
    max_prob: float = 1e-3,
    max_ngram: int = 8,
    min_repeats: int = 4,
    min_run_tokens: int = 16,
) -> Tensor:
    """Mark garbled (p < max_prob under both policies) and repetitive (one n-gram many times in a row) tokens.

    Args:
        prev_logprobs: [B, T] the learner's logprobs, nats.
        generation_logprobs: [B, T] the rollout engine's logprobs, nats.
        token_ids: [B, T] int, the predicted tokens themselves.
        token_mask: [B, T] bool or 0/1, true for response tokens.
        max_prob: probability below which a token counts as garbled, in (0, 1).
        max_ngram: longest repeated unit looked for, tokens.
        min_repeats: copies of the unit in a row, at least 2.
        min_run_tokens: shortest run that counts, tokens.

    Returns:
        [B, T] bool, false outside `token_mask`.

    Source: arXiv 2604.07853, section 3.2 (description of error tokens; the thresholds are ours).
    """
    mask = token_mask.bool()
    threshold = torch.tensor(max_prob, dtype=torch.float64).log()
    garbled = (prev_logprobs < threshold) & (generation_logprobs < threshold)
    repetitive = torch.zeros_like(mask)
    for ngram in range(1, min(max_ngram, mask.shape[-1] - 1) + 1):
        repetitive |= _repeated(token_ids, mask, ngram, max(ngram * min_repeats, min_run_tokens))
    return mask & (garbled | repetitive)


def error_token_rates(error_mask: Tensor, token_mask: Tensor, advantages: Tensor) -> dict[str, float]:
    """Count error tokens per response token: overall, and where the advantage is positive or negative.

    Args:
        error_mask: [B, T] bool from `error_token_mask`.
        token_mask: [B, T] bool or 0/1, true for response tokens.
        advantages: [B, T] advantage of each token's sequence.

    Returns:
        `error_tokens/` rate, rate_positive, rate_negative as fractions in [0, 1]; NaN where there is no such token.
    """
    mask = token_mask.bool()
    selections = {"rate": mask, "rate_positive": mask & (advantages > 0), "rate_negative": mask & (advantages < 0)}
    return {f"error_tokens/{name}": float(error_mask[chosen].double().mean()) for name, chosen in selections.items()}


def _repeated(token_ids: Tensor, mask: Tensor, ngram: int, min_run: int) -> Tensor:
    matches = torch.zeros_like(mask)
    matches[:, ngram:] = (token_ids[:, ngram:] == token_ids[:, :-ngram]) & mask[:, ngram:] & mask[:, :-ngram]
    # m matches in a row at distance n are a run of m + n tokens that repeats with period n.
    in_long_run = matches & (_run_lengths(matches) + ngram >= min_run)
    repeated = in_long_run.clone()
    for shift in range(1, ngram + 1):
        repeated[:, :-shift] |= in_long_run[:, shift:]
    return repeated


def _run_lengths(matches: Tensor) -> Tensor:
    width = matches.shape[-1]
    positions = torch.arange(width, device=matches.device).expand_as(matches)
    last_gap = positions.masked_fill(matches, -1).cummax(dim=-1).values
    next_gap = positions.masked_fill(matches, width).flip(-1).cummin(dim=-1).values.flip(-1)
    return (next_gap - last_gap - 1).masked_fill(~matches, 0)
