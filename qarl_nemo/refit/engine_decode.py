"""Lets vLLM 0.25.1's int4 experts decode by `qarl_kernels.decode_experts` instead of Marlin, from the same tensors.

Marlin stays for everything else: prompts and larger batches, other formats, GPUs and sizes that the kernel does not
take. The arithmetic is Marlin's up to the order of FP32 sums, so that the learner follows either.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SWITCH = "QARL_DECODE_EXPERTS"
"""The environment variable that leaves all experts to Marlin if it is 0."""


@functools.cache
def decode_int4_experts() -> None:
    """Make int4 experts in this process decode by the kernel; calling it again changes nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or os.environ.get(SWITCH) == "0":
        return
    from vllm import _custom_ops as ops

    ops.moe_wna16_marlin_gemm = decoding(ops.moe_wna16_marlin_gemm)


def decoding(marlin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator that takes what `marlin` takes and gives few rows to the kernel.

    Args:
        marlin: vLLM's `moe_wna16_marlin_gemm`.
    """
    from vllm.scalar_type import scalar_types

    from qarl_kernels.decode_experts import BLOCK_ROWS, SortedRows, decode_experts

    @functools.wraps(marlin)
    def multiply(
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
        sorted_rows: Tensor,
        experts: Tensor,
        count: Tensor,
        weight: Tensor,
        **named: Any,
    ) -> Tensor:
        extras = (bias, x_scale, global_scale, zeros, group_index, order)
        plain = all(extra is None or not extra.numel() for extra in extras)
        int4 = named["b_q_type"] == scalar_types.uint4b8 and x.dtype == scale.dtype == torch.bfloat16
        # Made at the first call, whatever its rows: while graphs are captured nothing can be loaded.
        known = plain and int4 and out is not None and _has_kernel(words.shape, scale.shape[1], x.device)
        if known and named["moe_block_size"] == BLOCK_ROWS:
            rows = SortedRows(sorted_rows, experts, count)
            weights = weight if named["mul_topk_weights"] else None
            return decode_experts(x, words, scale, rows, named["top_k"], weights, out)
        return marlin(
            x, out, words, bias, scale, x_scale, global_scale, zeros, group_index, order, workspace, sorted_rows,
            experts, count, weight, **named,
        )  # fmt: skip

    return multiply


@functools.cache
def _has_kernel(shape: torch.Size, groups: int, device: torch.device) -> bool:
    from qarl_kernels.ops.decode_experts import decode_config, decode_kernel

    k, n = 16 * shape[1], shape[2] // 2
    config = decode_config(k, n, k // groups)
    try:
        return config is not None and decode_kernel(config, device.index) is not None
    except (OSError, RuntimeError) as failure:
        warnings.warn(f"int4 experts decode by Marlin, since the kernel could not be compiled: {failure}", stacklevel=2)
        return False
