"""int4 experts on the few rows that each gets while an engine decodes, from weights in the order of vLLM's Marlin.

y[i] = bf16(sum_k x[i // top_k, k] * bf16(code[e, n, k] * scale[e, n, k // g])), times bf16(weight[i]) where rows are
weighted: Marlin's products and roundings. The FP32 sum is added in an order of its own, which, unlike Marlin's, does
not depend on what else is in the batch.

A batch of 32 that chooses 8 of 128 experts brings each two rows: reading weights takes all the time, and Marlin reads
them at 50 to 60 % of an H200's bandwidth.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from qarl_kernels.integer import dequantize_integer
from qarl_kernels.ops.decode_experts import BLOCK_ROWS, decode_config, decode_kernel, launch


class SortedRows(NamedTuple):
    """Rows by expert in blocks of 8, as vLLM's `moe_align_block_size` returns them.

    Attributes:
        rows: [8 B] int32, rows of the output; numbers from its length on are padding.
        experts: [B] int32, each block's expert; -1: none of this rank.
        count: [1] int32, how much of `rows` is in use; a multiple of 8.
    """

    rows: Tensor
    experts: Tensor
    count: Tensor


def unpack_marlin(words: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of int4 weights that vLLM holds in Marlin's order.

    Args:
        words: [E, K / 16, 2 N] int32, 8 codes each.
        scale: [E, G, N] BF16.

    Returns:
        codes: [E, N, K] int8 in -8 .. 7; scale: [E, N, G] BF16.

    Source: vLLM 0.25.1 csrc/quantization/marlin/gptq_marlin_repack.cu, marlin_utils.marlin_permute_scales.
    """
    num_experts, k_tiles, _ = words.shape
    # 64 columns are 4 parts of 16; lane 4 g + t has columns g and g + 8, K 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    lanes = words.view(num_experts, k_tiles, -1, 8, 4, 4, 1)
    nibbles = (lanes >> (4 * torch.arange(8, device=words.device))) & 15
    # The lowest bit of K is a nibble's highest place, then the half of the columns, then that of K.
    places = nibbles.view(*lanes.shape[:-1], 2, 2, 2)
    codes = places.permute(0, 2, 5, 7, 3, 1, 8, 4, 6).reshape(num_experts, -1, 16 * k_tiles)
    columns = scale.unflatten(-1, (-1, 8, 8)).mT.flatten(-3)
    return (codes - 8).to(torch.int8), columns.mT.contiguous()


def decode_experts(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    rows: SortedRows,
    top_k: int,
    weight: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by its expert's weight; a GPU of Hopper or later runs the kernel, a CPU the reference.

    Args:
        x: [T, K] BF16; row i of the output is made of x[i // top_k].
        words: [E, K / 16, 2 N] int32 in Marlin's order.
        scale: [E, K / g, N] BF16 in Marlin's order, g = 32, 64 or 128.
        rows: which expert each row has.
        top_k: rows of the output for each of x.
        weight: [T * top_k] or [T, top_k] FP32 router weights, or None: rows are not weighted.
        out: [T * top_k, N] BF16 to write to; rows of no expert keep what is there. None: zeros.

    Returns:
        out.

    Raises:
        ValueError: tensors that do not belong together, or sizes or a GPU that the kernel does not take; with the legal
            ones.
    """
    if out is None:
        out = x.new_zeros(x.shape[0] * top_k, words.shape[2] // 2)
    problems = _problems(x, words, scale, rows, top_k, weight, out)
    if problems:
        raise ValueError("decode_experts: " + "; ".join(problems))
    if x.device.type == "cpu":
        _reference(x, words, scale, rows, top_k, weight, out)
        return out
    k, n = 16 * words.shape[1], words.shape[2] // 2
    config = decode_config(k, n, k // max(scale.shape[1], 1))
    kernel = None if config is None else decode_kernel(config, x.device.index)
    if config is None or kernel is None:
        raise ValueError(
            f"decode_experts: K={k}, N={n} in {scale.shape[1]} groups on {torch.cuda.get_device_name(x.device)} "
            "(legal: Hopper or later, N a multiple of 64, groups of 32, 64 or 128, and 2 to 8 warps that share the "
            "blocks of 128 of K, or its groups, evenly)"
        )
    launch(kernel, config, x, words, scale, rows, top_k, weight, out)
    return out


def mismatches(legal: Mapping[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]) -> list[str]:
    """List tensors that differ from what they should be.

    Args:
        legal: argument -> tensor, and its legal dtype and shape.

    Returns:
        One message each.
    """
    return [
        f"{name} is {one.dtype} {list(one.shape)} (legal: {dtype} {list(shape)})"
        for name, (one, dtype, shape) in legal.items()
        if one.dtype != dtype or tuple(one.shape) != shape
    ]


def _problems(
    x: Tensor, words: Tensor, scale: Tensor, rows: SortedRows, top_k: int, weight: Tensor | None, out: Tensor
) -> list[str]:
    num_experts, k_tiles, twice_n = words.shape
    num_rows = x.shape[0] * top_k
    legal = {
        "x": (x, torch.bfloat16, (x.shape[0], 16 * k_tiles)),
        "words": (words, torch.int32, tuple(words.shape)),
        "scale": (scale, torch.bfloat16, (num_experts, scale.shape[1], twice_n // 2)),
        "out": (out, torch.bfloat16, (num_rows, twice_n // 2)),
    }
    legal |= {
        f"rows.{name}": (one, torch.int32, tuple(one.shape)) for name, one in zip(rows._fields, rows, strict=True)
    }
    problems = mismatches(legal)
    if weight is not None and (weight.dtype != torch.float32 or weight.numel() != num_rows):
        problems.append(f"weight is {weight.dtype} {list(weight.shape)} (legal: torch.float32, {num_rows} in all)")
    tensors = {name: one for name, (one, _, _) in legal.items()} | ({} if weight is None else {"weight": weight})
    return problems + [f"{name} is not contiguous" for name, one in tensors.items() if not one.is_contiguous()]


def _reference(
    x: Tensor, words: Tensor, scale: Tensor, rows: SortedRows, top_k: int, weight: Tensor | None, out: Tensor
) -> None:
    weights = dequantize_integer(*unpack_marlin(words, scale))
    for block in range(int(rows.count) // BLOCK_ROWS):
        expert = int(rows.experts[block])
        mine = rows.rows[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS].long()
        mine = mine[mine < out.shape[0]]
        if expert < 0:
            continue
        y = (x[mine // top_k].float() @ weights[expert].float().mT).to(torch.bfloat16)
        out[mine] = y if weight is None else y * weight.flatten()[mine].to(torch.bfloat16).unsqueeze(-1)
