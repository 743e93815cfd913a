"""Log-probabilities of tokens from logits, and their gradient: Triton or the torch reference, as in `dispatch.py`."""

import torch
from torch import Tensor

from qarl_kernels.dispatch import runs_kernels


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_softmax(logits / temperature) of the tokens, in FP32, the distribution's entropy and log Z.

    Args:
        logits: [N, V] BF16 or FP32.
        tokens: [N] int64.
        temperature: sampling temperature.

    Returns:
        logprobs, entropy in nats and log Z = log sum exp(logits / temperature), each [N] FP32, without a graph;
        the kernels' are within 2^-22 of the largest |logit| / temperature, or of log V, of exact ones.
    """
    if runs_kernels(logits):
        from qarl_kernels.ops.logprobs import logprobs_kernel

        return logprobs_kernel(logits, tokens.contiguous(), temperature)
    with torch.no_grad():
        logprobs, entropy = token_logprobs_reference(logits, tokens, temperature)
        chosen = _at_temperature(logits.gather(-1, tokens[:, None]).squeeze(-1), temperature)
        return logprobs, entropy, chosen.float() - logprobs


def token_logprobs_reference(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
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


def token_logprobs_backward(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, log_z: Tensor, grad: Tensor, temperature: float
) -> Tensor:
    """Return (one-hot of the token - softmax) * grad / temperature in place of the logits, rounded once.

    Args:
        logits: [N, V] BF16 or FP32, written.
        tokens: [N] int64.
        logprobs: [N] FP32 from `token_logprobs`.
        log_z: [N] FP32, likewise; the reference computes softmax anew.
        grad: [N] FP32, the gradient of logprobs.
        temperature: sampling temperature.

    Returns:
        logits.
    """
    if runs_kernels(logits):
        from qarl_kernels.ops.logprobs import logprobs_backward_kernel

        tokens, logprobs, log_z, grad = (tensor.contiguous() for tensor in (tokens, logprobs, log_z, grad))
        logprobs_backward_kernel(logits, tokens, logprobs, log_z, grad, temperature)
        return logits
    return token_logprobs_backward_reference(logits, tokens, grad, temperature)


def token_logprobs_backward_reference(logits: Tensor, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Return (one-hot of the token - softmax) * grad / temperature in place of the logits; see above."""
    grad, token = grad[:, None] / temperature, tokens[:, None]
    probabilities = _at_temperature(logits, temperature).softmax(-1, dtype=torch.float32)
    # 1 - softmax in FP32: of a token that is almost certain, BF16 would leave nothing.
    chosen = (1 - probabilities.gather(-1, token)) * grad
    torch.mul(probabilities, -grad, out=logits)
    return logits.scatter_(-1, token, chosen.to(logits.dtype))


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    # Softmax reads BF16 as it is: a copy of a whole vocabulary costs as much as the GEMM that made it.
    return logits if temperature == 1.0 else logits.float() / temperature
