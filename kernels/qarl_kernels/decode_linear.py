"""A dense int4 layer on the few rows of a decoding engine, from weights in the order of vLLM's Marlin.

y[m] = bf16(sum_k x[m, k] * bf16(code[n, k] * scale[n, k // g])): Marlin's products and roundings. The FP32 sum is added
in an order of its own, which does not depend on the other rows but on how many there are (up to 8, 16 or 32).

The weights of an attention projection of Qwen3-30B-A3B could be read in 1 us, where Marlin takes 9 to 11. So what
counts is how soon all reads are under way.
"""

import torch
from torch import Tensor

from qarl_kernels.decode_experts import mismatches, unpack_marlin
from qarl_kernels.integer import dequantize_integer
from qarl_kernels.ops.decode_linear import launch, linear_config, linear_kernel

ROW_COUNTS = (8, 16, 32)
"""Rows that the kernel is compiled for; a batch takes the next larger one."""


def decode_linear(x: Tensor, words: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply a few rows by a weight; a GPU of Hopper or later runs the kernel, a CPU the reference.

    Args:
        x: [M, K] BF16, M from 1 to 32.
        words: [K / 16, 2 N] int32 in Marlin's order.
        scale: [K / g, N] BF16 in Marlin's order, g = 32, 64 or 128.
        out: [M, N] BF16 to write to; None: a new one.

    Returns:
        out.

    Raises:
        ValueError: tensors that do not belong together, or sizes or a GPU that the kernel does not take; with the legal
            ones.
    """
    if out is None:
        out = x.new_empty(x.shape[0], words.shape[1] // 2)
    if problems := _problems(x, words, scale, out):
        raise ValueError("decode_linear: " + "; ".join(problems))
    if x.device.type == "cpu":
        weight = dequantize_integer(*unpack_marlin(words.unsqueeze(0), scale.unsqueeze(0)))[0]
        return out.copy_(x.float() @ weight.float().mT)
    k, n = x.shape[1], out.shape[1]
    rows = next(count for count in ROW_COUNTS if x.shape[0] <= count)
    config = linear_config(k, n, k // max(scale.shape[0], 1), rows)
    kernel = None if config is None else linear_kernel(config, x.device.index)
    if kernel is None:
        raise ValueError(
            f"decode_linear: K={k}, N={n} in {scale.shape[0]} groups on {torch.cuda.get_device_name(x.device)} "
            "(legal: Hopper or later, N a multiple of 64, and of 128 with more than 16 rows, groups of 32, 64 or 128, "
            "and 2 to 32 warps that share K in slices of 64 to 512, which are whole groups or divide one)"
        )
    launch(kernel, x, words, scale, out)
    return out


def _problems(x: Tensor, words: Tensor, scale: Tensor, out: Tensor) -> list[str]:
    k_tiles, twice_n = words.shape
    legal = {
        "x": (x, torch.bfloat16, (x.shape[0], 16 * k_tiles)),
        "words": (words, torch.int32, tuple(words.shape)),
        "scale": (scale, torch.bfloat16, (scale.shape[0], twice_n // 2)),
        "out": (out, torch.bfloat16, (x.shape[0], twice_n // 2)),
    }
    problems = mismatches(legal)
    if not 1 <= x.shape[0] <= ROW_COUNTS[-1]:
        problems.append(f"x has {x.shape[0]} rows (legal: 1 to {ROW_COUNTS[-1]})")
    problems += [f"{name} is not contiguous" for name, (one, _, _) in legal.items() if not one.is_contiguous()]
    # The kernel reads 16 bytes at a time, wherever a view begins.
    return problems + [
        f"{name} begins at an address that is no multiple of 16"
        for name, (one, _, _) in legal.items()
        if one.data_ptr() % 16
    ]
