"""Log-probabilities and entropy of tokens from hidden states, a few positions at a time.

A vocabulary of 150,000 turns 16,000 positions into 10 GB of FP32 logits, and a softmax and its gradient need several
of them. Here only one chunk's exist at a time, and the backward computes them again from the hidden states.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from qarl_kernels import token_logprobs, token_logprobs_backward, token_logprobs_reference


def score_in_chunks(logits: Tensor, tokens: Tensor, temperature: float, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Do as `token_logprobs_reference`, with at most `chunk_size` rows in FP32 at a time, in forward and backward.

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
    logprobs, entropy = _join(
        [checkpoint(token_logprobs_reference, *chunk, temperature, **options) for chunk in chunks]
    )
    return logprobs, entropy


def head_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Do as `token_logprobs_reference` for logits hidden @ weight^T, of which at most `chunk_size` rows exist.

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
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        chunks = zip(hidden.split(chunk_size), tokens.split(chunk_size), strict=True)
        logprobs, entropy, log_z = _join(
            [token_logprobs(nn.functional.linear(rows, weight), chosen, temperature) for rows, chosen in chunks]
        )
        ctx.save_for_backward(hidden, weight, tokens, logprobs, log_z)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, logprobs, log_z = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # In FP32, because rounding each chunk's sum to BF16 would lose what many chunks add.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        tensors = hidden, tokens, logprobs, log_z, grad_logprobs, grad_hidden
        split = (tensor.split(ctx.chunk_size) for tensor in tensors)
        for rows, chosen, scored, log_sum, grad, grad_rows in zip(*split, strict=True):
            logits = nn.functional.linear(rows, weight)
            grad_logits = token_logprobs_backward(logits, chosen, scored, log_sum, grad, ctx.temperature)
            torch.mm(grad_logits, weight, out=grad_rows)
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.mT, rows)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total.

    Args:
        total: [M, N] FP32.
        left: [M, K] BF16 or FP32.
        right: [K, N] of the same dtype.
    """
    if left.is_cuda and left.dtype != total.dtype:
        # The GEMM adds its own FP32 sums: they are not rounded to BF16, and are not written and read in between.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _join(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
