"""Checks of the grouped GEMMs' operands; the copy engine needs rows whose size is a multiple of 16 bytes."""

import torch
from torch import Tensor

from qarl_kernels.ops.checks import tensor_problems

WEIGHT_ROUNDINGS = ("on_accumulator", "rounded_product")


def operand_problems(
    x: Tensor, weight: Tensor, offsets: Tensor, dtype: torch.dtype, *, contracted: int, multiple: int
) -> list[str]:
    """List what keeps x [M, K], weight [E, N, K] and offsets [E + 1] from being multiplied.

    Args:
        x: rows sorted by expert.
        weight: stacked weights.
        offsets: int32 row offsets.
        dtype: the legal dtype of both operands.
        contracted: the weight's contracted dimension, 1 or 2.
        multiple: what K must be a multiple of; N must be one of 8, the result's 16 bytes.
    """
    problems = tensor_problems("x", x, (dtype,)) + tensor_problems("weight", weight, (dtype,), 3)
    if x.dim() != 2 or weight.dim() != 3:
        return problems
    if x.shape[1] != weight.shape[contracted]:
        problems.append(f"x has {x.shape[1]} columns (legal: {weight.shape[contracted]}, as the weight)")
    if weight.shape[2] % multiple or weight.shape[2] == 0:
        problems.append(f"weight has K={weight.shape[2]} (legal: multiples of {multiple})")
    if weight.shape[1] % 8 or weight.shape[1] == 0:
        problems.append(f"weight has N={weight.shape[1]} (legal: multiples of 8)")
    if weight.device != x.device:
        problems.append(f"weight is on {weight.device} (legal: {x.device}, as x)")
    return problems + offsets_problems(x, weight.shape[0], offsets)


def offsets_problems(x: Tensor, num_experts: int, offsets: Tensor) -> list[str]:
    """List what keeps offsets from being the experts' row offsets.

    Args:
        x: [M, ...] the rows, for their device.
        num_experts: E.
        offsets: the offsets.
    """
    problems = tensor_problems("offsets", offsets, (torch.int32,), 1)
    if num_experts == 0 or offsets.shape[0] != num_experts + 1:
        problems.append(
            f"offsets has shape {list(offsets.shape)} (legal: [{num_experts + 1}] for {num_experts} experts)"
        )
    if offsets.device != x.device:
        problems.append(f"offsets is on {offsets.device} (legal: {x.device}, as x)")
    return problems


def scale_problems(name: str, scale: Tensor, shape: list[int]) -> list[str]:
    """List what keeps a tensor from being contiguous FP32 of the given shape.

    Args:
        name: the argument's name in messages.
        scale: the argument.
        shape: the legal shape.
    """
    problems = tensor_problems(name, scale, (torch.float32,), len(shape))
    if list(scale.shape) != shape:
        problems.append(f"{name} has shape {list(scale.shape)} (legal: {shape})")
    return problems


def bias_problems(bias: Tensor | None, columns: int, *, channel_first: bool) -> list[str]:
    """List what keeps a bias from being fused.

    Args:
        bias: [N] BF16 or None.
        columns: N.
        channel_first: whether the channels' scales are multiplied first.
    """
    if bias is None:
        return []
    problems = tensor_problems("bias", bias, (torch.bfloat16,), 1)
    if list(bias.shape) != [columns]:
        problems.append(f"bias has shape {list(bias.shape)} (legal: [{columns}])")
    # The engine fuses biases in dense layers only, which have this order.
    return problems if channel_first else [*problems, "bias without channel_first"]


def epilogue_problems(x: Tensor, row_weight: Tensor | None, weight_rounding: str | None) -> list[str]:
    """List what keeps a router weight from being applied.

    Args:
        x: [M, ...] the rows.
        row_weight: [M] FP32 or None.
        weight_rounding: where it is rounded; None without one.
    """
    if row_weight is None:
        return [] if weight_rounding is None else [f"weight_rounding={weight_rounding!r} without row_weight"]
    problems = scale_problems("row_weight", row_weight, [x.shape[0]])
    if weight_rounding not in WEIGHT_ROUNDINGS:
        problems.append(f"weight_rounding={weight_rounding!r} (legal: {', '.join(WEIGHT_ROUNDINGS)})")
    return problems
