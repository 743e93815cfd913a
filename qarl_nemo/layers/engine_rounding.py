"""Norms, rotation and SwiGLU with the rollout engine's rounding points, FP32 inside.

Both learners compute norms and rotation here, which round once. Residual additions need no such care: every kernel
rounds a sum of two BF16 tensors once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl_kernels import (
    rms_norm,
    rms_norm_backward,
    rotate_pairs,
    runs_kernels,
    swiglu_pair,
    swiglu_pair_backward,
)
from qarl_nemo.layers.norm_noise import add_noise


class _EngineNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, after_add: bool) -> Tensor:
        # Saving a view of the keys for the backward would keep the layer's queries, keys and values alive.
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps, after_add=after_add)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *rms_norm_backward(grad_out, x, weight, ctx.eps), None, None


class _EngineRotation(torch.autograd.Function):
    # Written by hand because autograd would keep four FP32 copies of x.
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_pairs(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return rotate_pairs(grad_out, *ctx.saved_tensors, back=True), None, None


class _EngineSwiglu(torch.autograd.Function):
    # Autograd's own would keep silu(gate), too.
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        # A view of a wider projection would keep all of it alive.
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return swiglu_pair(gate, up)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override] torch's decorator takes the name of ctx away
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu_pair_backward(grad_out, *ctx.saved_tensors)


def normalize(x: Tensor, weight: Tensor, eps: float, *, after_add: bool, noise: Tensor | None = None) -> Tensor:
    """Normalize the last dimension, y = x / sqrt(mean(x^2) + eps) * w in FP32, rounded once.

    Args:
        x: [..., H].
        weight: [H].
        eps: added to the mean square.
        after_add: the engine adds the residual in the same kernel.
        noise: [H] FP32, added to the weight.

    Returns:
        [..., H] in x's dtype, with gradients.

    Source: vLLM 0.25.1 csrc/libtorch_stable/layernorm_kernels.cu.
    """
    weight = add_noise(weight, noise)
    if runs_kernels(x):
        return _EngineNorm.apply(x, weight, eps, after_add)
    return rms_norm(x, weight, eps, after_add=after_add)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's pairs (x_i, x_{i + D/2}) in FP32, x cos - y sin and y cos + x sin, rounded once.

    Args:
        x: [B, S, heads, D].
        cos: [B, S, D] in x's dtype, as the engine keeps them.
        sin: [B, S, D] likewise.

    Returns:
        [B, S, heads, D] in x's dtype.

    Source: vLLM 0.25.1 csrc/libtorch_stable/pos_encoding_kernels.cu.
    """
    return _EngineRotation.apply(x, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return A = round(round(silu(gate)) * up), as the engine and transformers round it.

    Args:
        gate: [..., I].
        up: [..., I] in the same dtype.

    Returns:
        [..., I] in their dtype, with gradients.

    Source: vLLM 0.25.1 csrc/libtorch_stable/activation_kernels.cu.
    """
    if runs_kernels(gate) and torch.is_grad_enabled():
        return _EngineSwiglu.apply(gate, up)
    return swiglu_pair(gate, up)
