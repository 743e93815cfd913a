"""Lets vLLM 0.25.1's dense int4 layers on Marlin decode by `qarl_kernels.decode_linear`, from the same tensors.

Marlin stays for everything else: prompts and batches above 32 rows, other formats, layers with biases, GPUs and sizes
that the kernel does not take. Layers on Machete hold their weights in another order, and stay there. The arithmetic is
Marlin's up to the order of FP32 sums, so that the learner follows either.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.refit.engine_marlin import compiles, take_place, trying

SWITCH = "QARL_DECODE_LINEAR"
"""The environment variable that leaves all dense layers to Marlin if it is 0."""


@functools.cache
def decode_int4_linear() -> None:
    """Make dense int4 layers in this process decode by the kernel; calling it again changes nothing."""
    take_place("marlin_gemm", SWITCH, decoding)


def decoding(marlin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator that takes what `marlin` takes and gives few rows to the kernel.

    Args:
        marlin: vLLM's `marlin_gemm`.
    """
    from vllm.scalar_type import scalar_types

    from qarl_kernels.decode_linear import ROW_COUNTS, decode_linear

    def decode(x: Tensor, out: Tensor | None, words: Tensor, scale: Tensor, b_q_type: Any, **_: Any) -> Tensor | None:
        int4 = b_q_type == scalar_types.uint4b8
        # Made at the first call, whatever its rows: while graphs are captured nothing can be loaded.
        known = int4 and _has_kernels(words.shape, scale.shape[0], x.device)
        few = 1 <= x.shape[0] <= ROW_COUNTS[-1] and x.is_contiguous() and x.data_ptr() % 16 == 0
        return decode_linear(x, words, scale, out) if known and few else None

    return trying(decode, marlin)


@functools.cache
def _has_kernels(shape: torch.Size, groups: int, device: torch.device) -> bool:
    from qarl_kernels.decode_linear import ROW_COUNTS
    from qarl_kernels.ops.decode_linear import linear_config, linear_kernel

    k, n = 16 * shape[0], shape[1] // 2
    configs = [linear_config(k, n, k // groups, rows) for rows in ROW_COUNTS]
    return all(compiles(linear_kernel, config, device, "int4 layers") for config in configs)
