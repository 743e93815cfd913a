"""Lets vLLM 0.25.1's int4 experts decode by `qarl_kernels.decode_experts` instead of Marlin, from the same tensors.

Marlin stays for everything else: prompts and larger batches, other formats, GPUs and sizes that the kernel does not
take. The arithmetic is Marlin's up to the order of FP32 sums, so that the learner follows either.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.refit.engine_marlin import compiles, take_place, trying

SWITCH = "QARL_DECODE_EXPERTS"
"""The environment variable that leaves all experts to Marlin if it is 0."""


@functools.cache
def decode_int4_experts() -> None:
    """Make int4 experts in this process decode by the kernel; calling it again changes nothing."""
    take_place("moe_wna16_marlin_gemm", SWITCH, decoding)


def decoding(marlin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator that takes what `marlin` takes and gives few rows to the kernel.

    Args:
        marlin: vLLM's `moe_wna16_marlin_gemm`.
    """
    from vllm.scalar_type import scalar_types

    from qarl_kernels.decode_experts import BLOCK_ROWS, SortedRows, decode_experts

    def decode(
        x: Tensor,
        out: Tensor | None,
        words: Tensor,
        scale: Tensor,
        sorted_rows: Tensor,
        experts: Tensor,
        count: Tensor,
        weight: Tensor,
        **named: Any,
    ) -> Tensor | None:
        int4 = named["b_q_type"] == scalar_types.uint4b8
        # Made at the first call, whatever its rows: while graphs are captured nothing can be loaded.
        known = int4 and out is not None and _has_kernel(words.shape, scale.shape[1], x.device)
        readable = x.is_contiguous() and x.data_ptr() % 16 == 0
        if not (known and readable) or named["moe_block_size"] != BLOCK_ROWS:
            return None
        rows = SortedRows(sorted_rows, experts, count)
        weights = weight if named["mul_topk_weights"] else None
        return decode_experts(x, words, scale, rows, named["top_k"], weights, out)

    return trying(decode, marlin)


@functools.cache
def _has_kernel(shape: torch.Size, groups: int, device: torch.device) -> bool:
    from qarl_kernels.ops.decode_experts import decode_config, decode_kernel

    k, n = 16 * shape[1], shape[2] // 2
    return compiles(decode_kernel, decode_config(k, n, k // groups), device, "int4 experts")
