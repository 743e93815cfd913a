"""Grouped GEMM on packed 4-bit weights: y[m] = epilogue(sum_k x[m, k] * bf16(code[e, n, k] * scale[e, n, k // g])).

The weight is dequantized in registers, rounded to BF16 exactly as by `integer.dequantize_integer` (int4) or
`nvfp4.unscaled` (E2M1, whose products need no rounding), and handed to the tensor cores through shared memory. This
reads a quarter of the weight bytes and needs no BF16 copy of the weights. But every row tile dequantizes its weights
again, and the tensor cores wait meanwhile; with many rows per expert it is faster to dequantize once and run the BF16
GEMM.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.nvfp4 import GROUP
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.gemm_checks import epilogue_problems, offsets_problems
from qarl_kernels.ops.gemm_kernels import scale_rows, store_tile
from qarl_kernels.ops.grouped_gemm import EPILOGUES, launch_tiles
from qarl_kernels.ops.launch import TileConfig, tile_config
from qarl_kernels.ops.nvfp4 import grid_values
from qarl_kernels.ops.tiles import expert_tile

CODES_PER_WORD = 8
COLUMN_MULTIPLE = 32
"""The copy engine moves rows of 16 bytes, which are 32 codes."""
# The scales' dtype says what codes are: integers or E2M1.
GROUP_SIZES = {torch.bfloat16: (32, 64, 128), torch.float8_e4m3fn: (GROUP,)}


@triton.jit
def _nibble(words, scale, offset, POSITION: tl.constexpr):
    """bf16((code - 8) * scale) of the code at bits 4 * POSITION; offset is -136 * scale."""
    # 0x43000000 is 128.0, and its mantissa bits 16 to 19 count ones: 128 + code without an integer conversion.
    # Factors of 8 bits and 13 bits of offset make (128 + code) * scale - 136 * scale exact until it is rounded.
    if POSITION >= 4:
        bits = (words >> (4 * POSITION - 16)) & 0xF0000
    else:
        bits = (words << (16 - 4 * POSITION)) & 0xF0000
    return tl.fma((bits | 0x43000000).to(tl.float32, bitcast=True), scale, offset).to(tl.bfloat16)


@triton.jit
def _weight(words, scale, offset, POSITION: tl.constexpr, FP4: tl.constexpr):
    if FP4:
        weight = grid_values((words >> (4 * POSITION)) & 15) * scale
    else:
        weight = _nibble(words, scale, offset, POSITION)
    return weight


@triton.jit
def dequantize_words(words, scale, FP4: tl.constexpr):
    """bf16(code * scale) of words [N, W], 8 codes each, and scale [N, 1] or [N, W] FP32 -> [N, 8 W] BF16."""
    factor = tl.broadcast_to(scale, words.shape)
    offset = factor * -136.0
    # Joins put the first operand first in the new last axis: the chain below interleaves codes 0 to 7 in order.
    even_pairs = tl.join(
        tl.join(_weight(words, factor, offset, 0, FP4), _weight(words, factor, offset, 4, FP4)),
        tl.join(_weight(words, factor, offset, 2, FP4), _weight(words, factor, offset, 6, FP4)),
    )
    odd_pairs = tl.join(
        tl.join(_weight(words, factor, offset, 1, FP4), _weight(words, factor, offset, 5, FP4)),
        tl.join(_weight(words, factor, offset, 3, FP4), _weight(words, factor, offset, 7, FP4)),
    )
    # E2M1 is rounded here: Triton would move a reshape that ends the chain into shared memory, whose layout is none.
    return tl.join(even_pairs, odd_pairs).reshape(words.shape[0], words.shape[1] * 8).to(tl.bfloat16)


@triton.jit
def _grouped_gemm_int4_kernel(
    x_desc,  # [M, K] BF16
    packed_desc,  # [E, N, K / 8] int32
    out_desc,  # [M, N], ragged
    tiles_ptr,  # [1 + T, 4] int32
    scale_ptr,  # [E, N, K / g] BF16, or E4M3
    row_weight_ptr,  # [M] FP32
    N,
    K,
    EPILOGUE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    # A step has one int4 scale per row; an E2M1 scale belongs to two words.
    tl.static_assert(BLOCK_K % GROUP_SIZE == 0 if FP4 else GROUP_SIZE % BLOCK_K == 0, "steps of whole scales")
    word = tl.arange(0, BLOCK_K // 8)
    num_m_tiles = tl.load(tiles_ptr)
    num_n_tiles = tl.cdiv(N, BLOCK_N)
    num_groups = K // GROUP_SIZE
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, num_m_tiles * num_n_tiles, step, flatten=FLATTEN):
        expert, row, stop, column = expert_tile(tile, tiles_ptr, num_m_tiles, num_n_tiles, GROUP_M, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_N)
        scale_row = scale_ptr + (expert.to(tl.int64) * N + columns) * num_groups
        real_column = columns < N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            words = packed_desc.load([expert, column, k // 8]).reshape(BLOCK_N, BLOCK_K // 8)
            if FP4:
                groups = (k // 8 + word) // (GROUP_SIZE // 8)
                valid = real_column[:, None] & (groups < num_groups)[None, :]
                scale = tl.load(scale_row[:, None] + groups[None, :], mask=valid, other=0.0).to(tl.float32)
            else:
                scale = tl.load(scale_row + k // GROUP_SIZE, mask=real_column, other=0.0).to(tl.float32)[:, None]
            acc = tl.dot(x, dequantize_words(words, scale, FP4).T, acc)
        if EPILOGUE != 0:
            rows = row + tl.arange(0, BLOCK_M)
            weight = tl.load(row_weight_ptr + rows, mask=rows < stop, other=0.0)
            acc = scale_rows(acc, weight[:, None], EPILOGUE)
        store_tile(out_desc, acc, row, stop, column, SPLIT)


def launch_grouped_gemm_int4(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    epilogue: int,
    out: Tensor,
    config: TileConfig,
) -> Tensor:
    """Run the int4 kernel with a given tile (for the operator below and for the tuner).

    Args:
        x: [M, K] BF16.
        packed: [E, N, K / 8] int32.
        scale: [E, N, K / g] BF16 of int4 codes, or [E, N, K / 16] E4M3 of E2M1 codes.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 or None.
        epilogue: a value of `EPILOGUES`.
        out: [M, N], written.
        config: the tile; steps longer than a group of int4 codes are shortened to it.

    Returns:
        out.
    """
    group_size = x.shape[1] // scale.shape[2]
    fp4 = scale.dtype == torch.float8_e4m3fn
    if not fp4:
        config = replace(config, block_k=min(config.block_k, group_size))
    box, constants = (config.block_n, config.block_k // CODES_PER_WORD), {"GROUP_SIZE": group_size, "FP4": fp4}
    pointers = scale, row_weight
    return launch_tiles(
        _grouped_gemm_int4_kernel, x, packed, offsets, out, config, pointers, w_box=box, EPILOGUE=epilogue, **constants
    )


@torch.library.custom_op("qarl::grouped_gemm_int4", mutates_args=())
def _int4_op(
    x: Tensor, packed: Tensor, scale: Tensor, offsets: Tensor, row_weight: Tensor | None, epilogue: int
) -> Tensor:
    out = x.new_empty(x.shape[0], packed.shape[1])
    config = tile_config("int4", x, packed.shape[1], x.shape[1], packed.shape[0])
    return launch_grouped_gemm_int4(x, packed, scale, offsets, row_weight, epilogue, out, config)


@_int4_op.register_fake
def _(x: Tensor, packed: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[1])


def grouped_gemm_int4(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    offsets: Tensor,
    *,
    row_weight: Tensor | None = None,
    weight_rounding: str | None = None,
) -> Tensor:
    """Multiply BF16 rows by their expert's packed weight: y = bf16(x @ bf16(value(code) * scale)^T).

    Args:
        x: [M, K] BF16, rows sorted by expert.
        packed: [E, N, K / 8] int32, 8 codes each, lowest bits first.
        scale: [E, N, K / g] BF16, g 32, 64 or 128: codes are integers, stored q + 8. [E, N, K / 16] float8_e4m3fn:
            codes are E2M1, without their global scale.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 factor of each row, in which a global scale is; or None.
        weight_rounding: with row_weight: see `grouped_gemm_bf16`.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 marlin_template.h (the product is rounded to BF16 before it is multiplied).
    """
    problems = tensor_problems("x", x, (torch.bfloat16,)) + tensor_problems("packed", packed, (torch.int32,), 3)
    problems += tensor_problems("scale", scale, tuple(GROUP_SIZES), 3)
    if not problems:
        problems += _shape_problems(x, packed, scale) + offsets_problems(x, packed.shape[0], offsets)
        problems += epilogue_problems(x, row_weight, weight_rounding)
    refuse("grouped_gemm_int4", problems)
    return _int4_op(x, packed, scale, offsets, row_weight, EPILOGUES[weight_rounding])


def _shape_problems(x: Tensor, packed: Tensor, scale: Tensor) -> list[str]:
    num_experts, n, words = packed.shape
    k = words * CODES_PER_WORD
    problems = []
    if x.shape[1] != k or k % COLUMN_MULTIPLE or k == 0:
        legal = f"the same multiple of {COLUMN_MULTIPLE}"
        problems.append(f"x has {x.shape[1]} columns, packed holds {k} (legal: {legal})")
    if n % 8 or n == 0:
        problems.append(f"packed has N={n} (legal: multiples of 8)")
    legal = [[num_experts, n, k // size] for size in GROUP_SIZES[scale.dtype] if k % size == 0]
    if list(scale.shape) not in legal:
        problems.append(f"scale has shape {list(scale.shape)} (legal: {legal}, for group sizes that divide K)")
    return problems
