"""Grouped GEMM of INT8 rows and weights: y[m] = epilogue(sum_k a8[m, k] * w8[e, n, k]), summed in int32.

    experts   y = bf16(w_scale[e, n] * (a_scale[m] * acc) * r[m])       r: the router weight where one is given
    dense     y = bf16(a_scale[m] * (w_scale[e, n] * acc))

Sums of integers are exact, so neither tiles nor the order of K show in the result: it is the engine's bit for bit. Only
the int32 sum's rounding to FP32 and the epilogue round. `grouped_gemm.py` explains tiles, descriptors and launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.checks import refuse
from qarl_kernels.ops.gemm_checks import operand_problems, scale_problems
from qarl_kernels.ops.gemm_kernels import scale_columns, store_tile
from qarl_kernels.ops.grouped_gemm import compile_options, fake_rows, launch_grid, output_descriptor
from qarl_kernels.ops.launch import TileConfig, tile_config
from qarl_kernels.ops.tiles import build_tile_table, descriptor, expert_tile


@triton.jit
def _grouped_gemm_int8_kernel(
    x_desc,  # [M, K] INT8
    w_desc,  # [E, N, K] INT8
    out_desc,  # [M, N], ragged
    tiles_ptr,  # [1 + T, 4] int32
    row_scale_ptr,  # [M] FP32
    column_scale_ptr,  # [E, N] FP32
    row_weight_ptr,  # [M] FP32
    N,
    K,
    CHANNEL_FIRST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    num_m_tiles = tl.load(tiles_ptr)
    num_n_tiles = tl.cdiv(N, BLOCK_N)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, num_m_tiles * num_n_tiles, step, flatten=FLATTEN):
        expert, row, stop, column = expert_tile(tile, tiles_ptr, num_m_tiles, num_n_tiles, GROUP_M, BLOCK_N)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for k in tl.range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            w = w_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
            sums = tl.dot(x, w, sums, out_dtype=tl.int32)
        acc = sums.to(tl.float32)
        rows = row + tl.arange(0, BLOCK_M)
        row_scale = tl.load(row_scale_ptr + rows, mask=rows < stop, other=0.0)[:, None]
        column_scale = column_scale_ptr + expert.to(tl.int64) * N
        if CHANNEL_FIRST:
            acc = scale_columns(acc, column_scale, column, N, BLOCK_N) * row_scale
        else:
            acc = scale_columns(acc * row_scale, column_scale, column, N, BLOCK_N)
        if WEIGHTED:
            acc = acc * tl.load(row_weight_ptr + rows, mask=rows < stop, other=0.0)[:, None]
        store_tile(out_desc, acc, row, stop, column, SPLIT)


def launch_grouped_gemm_int8(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    out: Tensor,
    config: TileConfig,
    *,
    channel_first: bool,
) -> Tensor:
    """Run the INT8 kernel with a given tile (for the operator below and for the tuner).

    Args:
        a8: [M, K] int8.
        a_scale: [M, 1] FP32.
        w8: [E, N, K] int8.
        w_scale: [E, N, 1] FP32.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 or None.
        out: [M, N], written.
        config: the tile.
        channel_first: multiply by w_scale before a_scale.

    Returns:
        out.
    """
    (num_rows, k), n = a8.shape, out.shape[1]
    if num_rows == 0:
        return out
    tiles = build_tile_table(offsets, num_rows, config.block_m)
    _grouped_gemm_int8_kernel[launch_grid(a8, tiles, n, config)](
        descriptor(a8, [config.block_m, config.block_k]),
        descriptor(w8, [1, config.block_n, config.block_k]),
        output_descriptor(out, config),
        tiles,
        a_scale,
        w_scale,
        row_weight,
        n,
        k,
        CHANNEL_FIRST=channel_first,
        WEIGHTED=row_weight is not None,
        BLOCK_K=config.block_k,
        **compile_options(config),
    )
    return out


@torch.library.custom_op("qarl::grouped_gemm_int8", mutates_args=())
def _int8_op(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    channel_first: bool,
) -> Tensor:
    num_experts, n, k = w8.shape
    out = a8.new_empty(a8.shape[0], n, dtype=torch.bfloat16)
    config = tile_config("int8", a8, n, k, num_experts)
    return launch_grouped_gemm_int8(
        a8, a_scale, w8, w_scale, offsets, row_weight, out, config, channel_first=channel_first
    )


_int8_op.register_fake(fake_rows)


def grouped_gemm_int8(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    row_weight: Tensor | None = None,
    channel_first: bool = False,
) -> Tensor:
    """Multiply INT8 rows by their expert's weight: y = bf16(w_scale * (a_scale * (a8 @ w8^T)) * row_weight).

    Args:
        a8: [M, K] int8, rows sorted by expert.
        a_scale: [M, 1] FP32.
        w8: [E, N, K] int8.
        w_scale: [E, N, 1] FP32.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 factor of each row, or None.
        channel_first: multiply by w_scale before a_scale, as for dense layers, which differs in the last bit.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 fused_moe.py, fused_moe_kernel (experts); scaled_mm_epilogues_c3x.hpp (dense).
    """
    problems = operand_problems(a8, w8, offsets, torch.int8, contracted=2, multiple=16)
    problems += scale_problems("a_scale", a_scale, [a8.shape[0], 1])
    problems += scale_problems("w_scale", w_scale, [*w8.shape[:2], 1])
    if row_weight is not None:
        problems += scale_problems("row_weight", row_weight, [a8.shape[0]])
    refuse("grouped_gemm_int8", problems)
    return _int8_op(a8, a_scale, w8, w_scale, offsets, row_weight, channel_first)
