"""Lets vLLM 0.25.1's dense int4 layers on Marlin decode by `qarl_kernels.decode_linear`, from the same tensors.

Marlin stays for everything else: prompts and batches above 32 rows, other formats, layers with biases, GPUs and sizes
that the kernel does not take. Layers on Machete hold their weights in another order, and stay there. The arithmetic is
Marlin's up to the order of FP32 sums, so that the learner follows either.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SWITCH = "QARL_DECODE_LINEAR"
"""The environment variable that leaves all dense layers to Marlin if it is 0."""


@functools.cache
def decode_int4_linear() -> None:
    """Make dense int4 layers in this process decode by the kernel; calling it again changes nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or os.environ.get(SWITCH) == "0":
        return
    from vllm import _custom_ops as ops

    ops.marlin_gemm = decoding(ops.marlin_gemm)


def decoding(marlin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator that takes what `marlin` takes and gives few rows to the kernel.

    Args:
        marlin: vLLM's `marlin_gemm`.
    """
    from vllm.scalar_type import scalar_types

    from qarl_kernels.decode_linear import ROW_COUNTS, decode_linear

    def int4(
        x: Tensor,
        out: Tensor | None,
        words: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        x_scale: Tensor | None,
        global_scale: Tensor | None,
        zeros: Tensor | None,
        group_index: Tensor | None,
        order: Tensor | None,
        workspace: Tensor,
        b_q_type: Any,
        **named: Any,
    ) -> Tensor:
        extras = (bias, x_scale, global_scale, zeros, group_index, order)
        plain = all(extra is None or not extra.numel() for extra in extras)
        plain = plain and b_q_type == scalar_types.uint4b8 and x.dtype == scale.dtype == torch.bfloat16
        # Made at the first call, whatever its rows: while graphs are captured nothing can be loaded.
        known = plain and _has_kernels(words.shape, scale.shape[0], x.device)
        few = 1 <= x.shape[0] <= ROW_COUNTS[-1] and x.is_contiguous() and x.data_ptr() % 16 == 0
        if known and few:
            return decode_linear(x, words, scale, out)
        return marlin(
            x, out, words, bias, scale, x_scale, global_scale, zeros, group_index, order, workspace, b_q_type, **named
        )

    @functools.wraps(marlin)
    def multiply(*operands: Any, **named: Any) -> Tensor:
        # vLLM's FP4 and FP8 layers name theirs.
        return int4(*operands, **named) if operands else marlin(**named)

    return multiply


@functools.cache
def _has_kernels(shape: torch.Size, groups: int, device: torch.device) -> bool:
    from qarl_kernels.decode_linear import ROW_COUNTS
    from qarl_kernels.ops.decode_linear import linear_config, linear_kernel

    k, n = 16 * shape[0], shape[1] // 2
    configs = [linear_config(k, n, k // groups, rows) for rows in ROW_COUNTS]
    try:
        return all(config is not None and linear_kernel(config, device.index) is not None for config in configs)
    except (OSError, RuntimeError) as failure:
        warnings.warn(f"int4 layers decode by Marlin, since a kernel could not be compiled: {failure}", stacklevel=2)
        return False
