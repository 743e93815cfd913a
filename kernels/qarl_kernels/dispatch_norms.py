"""Norms, rotation and SwiGLU as the rollout engine rounds them, and their gradients: Triton or the torch reference."""

import torch
from torch import Tensor, nn

from qarl_kernels.dispatch import runs_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, after_add: bool) -> Tensor:
    """Normalize the last dimension in FP32, y = round(x * rsqrt(mean(x^2) + eps) * w), rounded once.

    Args:
        x: [..., H] BF16 or FP32.
        weight: [H] of the same dtype.
        eps: added to the mean square.
        after_add: the engine normalizes in the kernel that adds the residual, which adds squares in another order.

    Returns:
        [..., H] in x's dtype, without a gradient; the kernels add in the engine's order.
    """
    if _has_norm(x):
        from qarl_kernels.ops.norm import rms_norm_in_engine_order

        return rms_norm_in_engine_order(_rows(x), weight, eps, after_add=after_add).view(x.shape)
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


def rms_norm_backward(grad_out: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of y = x / sqrt(mean(x^2) + eps) * w, each rounded once.

    Args:
        grad_out: [..., H] in x's dtype.
        x: [..., H] BF16 or FP32.
        weight: [H] of the same dtype.
        eps: added to the mean square.

    Returns:
        Gradients of x [..., H] and weight [H] in their dtypes.
    """
    if _has_norm(x):
        from qarl_kernels.ops.norm_backward import rms_norm_backward_kernel

        grad_x, grad_weight = rms_norm_backward_kernel(_rows(grad_out), _rows(x), weight, eps)
        return grad_x.view(x.shape), grad_weight
    x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
    with torch.enable_grad():
        out = nn.functional.rms_norm(x, weight.shape, weight, eps)
        return torch.autograd.grad(out, (x, weight), grad_out)


def _has_norm(x: Tensor) -> bool:
    if not runs_kernels(x):
        return False
    from qarl_kernels.ops.norm import MAX_NORM_COLUMNS

    return x.shape[-1] <= MAX_NORM_COLUMNS and x.shape[-1] % 8 == 0


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Rotate each head's pairs (x_i, x_{i + D/2}) in FP32, x cos - y sin and y cos + x sin, rounded once.

    Args:
        x: [A, B, heads, D].
        cos: [A, B, D] in x's dtype; A and B may be 1.
        sin: likewise.
        back: multiply by the transposed matrix [[cos, sin], [-sin, cos]], which gives the gradient.

    Returns:
        [A, B, heads, D] in x's dtype, without a gradient.
    """
    if runs_kernels(x):
        from qarl_kernels.ops.rotation import rotate_pairs_kernel

        return rotate_pairs_kernel(x, cos, sin, back=back)
    return rotate_pairs_reference(x, cos, sin, back=back)


def rotate_pairs_reference(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Rotate pairs (x_i, x_{i + D/2}); see `rotate_pairs`."""
    first, second = (half.float() for half in x.chunk(2, dim=-1))
    (cos_first, cos_second), (sin_first, sin_second) = (
        [half.float().unsqueeze(-2) for half in table.chunk(2, dim=-1)] for table in (cos, sin)
    )
    if back:
        sin_first, sin_second = -sin_second, -sin_first
    halves = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    return torch.cat([half.to(x.dtype) for half in halves], dim=-1)


def swiglu_pair(gate: Tensor, up: Tensor) -> Tensor:
    """Return A = round(round(silu(gate)) * up).

    Args:
        gate: [..., I] BF16 or FP32.
        up: likewise.

    Returns:
        [..., I] in their dtype; the kernel's has no gradient.
    """
    if runs_kernels(gate):
        from qarl_kernels.ops.swiglu_pair import swiglu_pair_kernel

        return swiglu_pair_kernel(gate.contiguous(), up.contiguous())
    return nn.functional.silu(gate) * up


def swiglu_pair_backward(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of A = silu(gate) * up in FP32, each rounded once.

    Args:
        grad_out: [..., I] BF16 or FP32.
        gate: likewise.
        up: likewise.

    Returns:
        Gradients of gate and up, [..., I] in their dtype.
    """
    if runs_kernels(gate):
        from qarl_kernels.ops.swiglu_pair import swiglu_pair_backward_kernel

        return swiglu_pair_backward_kernel(grad_out.contiguous(), gate.contiguous(), up.contiguous())
    grad, wide_gate, wide_up = (tensor.float() for tensor in (grad_out, gate, up))
    sigmoid = wide_gate.sigmoid()
    slope = sigmoid * (1 + wide_gate * (1 - sigmoid))
    return (grad * wide_up * slope).to(gate.dtype), (grad * (wide_gate * sigmoid)).to(up.dtype)
