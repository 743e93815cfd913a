"""Triton kernels of the BF16, FP8 and INT8 grouped GEMMs: y[m] = epilogue(sum_k x[m, k] * W[e(m), n, k]).

Persistent programs walk over the tile table. Operands arrive by the copy engine (TMA), which reads zeros beyond a
tensor's end; rows beyond an expert's end are its neighbour's, computed and not stored. A tile is stored through a
ragged descriptor that ends at the expert's last row, so a partial tile needs no mask.
"""

import triton
import triton.language as tl

from qarl_kernels.ops.exact_math import multiply_add
from qarl_kernels.ops.tiles import expert_tile, halves, store_ragged


@triton.jit
def scale_rows(acc, weight, EPILOGUE: tl.constexpr):
    """Return acc * weight in FP32, with both factors rounded to BF16 first if EPILOGUE is 2; weight broadcasts."""
    if EPILOGUE == 2:
        acc = acc.to(tl.bfloat16).to(tl.float32)
        weight = weight.to(tl.bfloat16).to(tl.float32)
    return acc * weight


@triton.jit
def scale_columns(acc, scale_ptr, column, N, BLOCK_N: tl.constexpr):
    """Return acc times the scales of its columns, those past N times zero."""
    columns = column + tl.arange(0, BLOCK_N)
    return acc * tl.load(scale_ptr + columns, mask=columns < N, other=0.0)[None, :]


@triton.jit
def scale_and_add(acc, row_scale, bias_ptr, column, N, BLOCK_N: tl.constexpr):
    """Return acc * row_scale plus the biases of its columns, rounded once; without biases only the product."""
    if bias_ptr is None:
        acc = acc * row_scale
    else:
        columns = column + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        acc = multiply_add(acc, row_scale, bias[None, :])
    return acc


@triton.jit
def store_tile(out_desc, tile, row, stop, column, SPLIT: tl.constexpr):
    """Store a tile's rows below `stop` in SPLIT (1, 2 or 4) slices of columns, which share a buffer."""
    if SPLIT == 1:
        store_ragged(out_desc, tile.to(out_desc.dtype), stop, row, column)
    else:
        left, right = halves(tile)
        half: tl.constexpr = tile.shape[1] // 2
        store_tile(out_desc, left, row, stop, column, SPLIT // 2)
        store_tile(out_desc, right, row, stop, column + half, SPLIT // 2)


@triton.jit
def grouped_gemm_kernel(
    x_desc,  # [M, K]
    w_desc,  # [E, N, K], or [E, K, N] if TRANSPOSED
    out_desc,  # [M, N], ragged
    tiles_ptr,  # [1 + T, 4] int32
    row_scale_ptr,  # [M] FP32
    column_scale_ptr,  # [E, N] FP32
    row_weight_ptr,  # [M] FP32
    bias_ptr,  # [N] BF16, for SCALES == 2; None without
    N,
    K,
    SCALES: tl.constexpr,  # 0: none; 1: the row's before the column's; 2: after it
    EPILOGUE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """BF16, E4M3 or INT8 operands summed over all of K in the tensor cores, scaled in the epilogue."""
    sum_dtype: tl.constexpr = tl.int32 if x_desc.dtype == tl.int8 else tl.float32
    num_m_tiles = tl.load(tiles_ptr)
    num_n_tiles = tl.cdiv(N, BLOCK_N)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, num_m_tiles * num_n_tiles, step, flatten=FLATTEN):
        expert, row, stop, column = expert_tile(tile, tiles_ptr, num_m_tiles, num_n_tiles, GROUP_M, BLOCK_N)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=sum_dtype)
        for k in tl.range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            if TRANSPOSED:
                w = w_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
            else:
                w = w_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
            sums = tl.dot(x, w, sums, out_dtype=sum_dtype)
        acc = sums.to(tl.float32)
        rows = row + tl.arange(0, BLOCK_M)
        if SCALES != 0:
            row_scale = tl.load(row_scale_ptr + rows, mask=rows < stop, other=0.0)[:, None]
            column_scale = column_scale_ptr + expert.to(tl.int64) * N
            if SCALES == 1:
                acc = scale_columns(acc * row_scale, column_scale, column, N, BLOCK_N)
            else:
                acc = scale_columns(acc, column_scale, column, N, BLOCK_N)
                acc = scale_and_add(acc, row_scale, bias_ptr, column, N, BLOCK_N)
        if EPILOGUE != 0:
            row_weight = tl.load(row_weight_ptr + rows, mask=rows < stop, other=0.0)
            acc = scale_rows(acc, row_weight[:, None], EPILOGUE)
        store_tile(out_desc, acc, row, stop, column, SPLIT)


@triton.jit
def grouped_gemm_fp8_block_kernel(
    x_desc,  # [M, K] E4M3
    w_desc,  # [E, N, K] E4M3
    out_desc,  # [M, N], ragged
    tiles_ptr,  # [1 + T, 4] int32
    x_scale_ptr,  # [M, K / 128] FP32
    w_scale_ptr,  # [E, ceil(N / 128), K / 128] FP32
    row_weight_ptr,  # [M] FP32
    N,
    K,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """E4M3 operands summed over 128 of K in the tensor cores, scaled and added up outside them."""
    tl.static_assert(128 % BLOCK_N == 0 and BLOCK_K == 128, "a tile has one weight scale per K-block")
    num_m_tiles = tl.load(tiles_ptr)
    num_n_tiles = tl.cdiv(N, BLOCK_N)
    num_blocks = tl.cdiv(K, 128)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, num_m_tiles * num_n_tiles, step, flatten=FLATTEN):
        expert, row, stop, column = expert_tile(tile, tiles_ptr, num_m_tiles, num_n_tiles, GROUP_M, BLOCK_N)
        rows = row + tl.arange(0, BLOCK_M)
        x_scale = x_scale_ptr + rows.to(tl.int64) * num_blocks
        w_scale = w_scale_ptr + (expert.to(tl.int64) * tl.cdiv(N, 128) + column // 128) * num_blocks
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in tl.range(0, num_blocks):
            x = x_desc.load([row, block * 128])
            w = w_desc.load([expert, column, block * 128]).reshape(BLOCK_N, 128).T
            scale = tl.load(x_scale + block, mask=rows < stop, other=0.0) * tl.load(w_scale + block)
            acc += tl.dot(x, w) * scale[:, None]
        if WEIGHTED:
            acc = acc * tl.load(row_weight_ptr + rows, mask=rows < stop, other=0.0)[:, None]
        store_tile(out_desc, acc, row, stop, column, SPLIT)
