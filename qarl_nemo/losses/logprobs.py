"""Log-probabilities and entropy of tokens from hidden states, a few positions at a time.

A vocabulary of 150,000 turns 16,000 positions into 10 GB of FP32 logits, and a softmax and its gradient need several
of them. Here only one chunk's exist at a time, and the backward computes them again from the hidden states.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def score(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log_softmax(logits / temperature) of the tokens, in FP32, and the distribution's entropy.

    Args:
        logits: [N, V].
        tokens: [N] int64.
        temperature: sampling temperature.

    Returns:
        logprobs [N] FP32, entropy [N] FP32 without a graph, in nats.
    """
    logprobs = _at_temperature(logits, temperature).log_softmax(-1, dtype=torch.float32)
    with torch.no_grad():
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropy


def score_in_chunks(logits: Tensor, tokens: Tensor, temperature: float, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Do as `score`, with at most `chunk_size` rows in FP32 at a time, in forward and backward.

    Args:
        logits: [N, V].
        tokens: [N] int64.
        temperature: sampling temperature.
        chunk_size: rows of a chunk.

    Returns:
        logprobs [N] FP32, entropy [N] FP32 without a graph, in nats.
    """
    options = {"use_reentrant": False, "preserve_rng_state": False}
    chunks = zip(logits.split(chunk_size), tokens.split(chunk_size), strict=True)
    return _join([checkpoint(score, *chunk, temperature, **options) for chunk in chunks])


def head_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Do as `score` for logits hidden @ weight^T, of which at most `chunk_size` rows exist at a time.

    Args:
        hidden: [N, H], the model's last hidden states.
        weight: [V, H], the head's.
        tokens: [N] int64.
        temperature: sampling temperature.
        chunk_size: rows of a chunk.

    Returns:
        logprobs [N] FP32, entropy [N] FP32 without a graph, in nats.
    """
    return _HeadLogprobs.apply(hidden, weight, tokens, temperature, chunk_size)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, tokens)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        chunks = zip(hidden.split(chunk_size), tokens.split(chunk_size), strict=True)
        logprobs, entropy = _join(
            [score(nn.functional.linear(rows, weight), chosen, temperature) for rows, chosen in chunks]
        )
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # In FP32, because rounding each chunk's sum to BF16 would lose what many chunks add.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        split = (tensor.split(ctx.chunk_size) for tensor in (hidden, tokens, grad_logprobs, grad_hidden))
        for rows, chosen, grad, grad_rows in zip(*split, strict=True):
            grad_logits = _grad_logits(nn.functional.linear(rows, weight), chosen, grad, ctx.temperature)
            torch.mm(grad_logits, weight, out=grad_rows)
            if grad_weight is not None:
                grad_weight += grad_logits.mT @ rows
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    # Softmax reads BF16 as it is: a copy of a whole vocabulary costs as much as the GEMM that made it.
    return logits if temperature == 1.0 else logits.float() / temperature


def _grad_logits(logits: Tensor, tokens: Tensor, grad_logprobs: Tensor, temperature: float) -> Tensor:
    # (one-hot of the token - softmax) * grad / temperature, in place of the logits.
    grad, token = grad_logprobs[:, None] / temperature, tokens[:, None]
    probabilities = _at_temperature(logits, temperature).softmax(-1, dtype=torch.float32)
    chosen = (1 - probabilities.gather(-1, token)) * grad
    torch.mul(probabilities, -grad, out=logits)
    return logits.scatter_(-1, token, chosen.to(logits.dtype))


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)
