"""Grouped GEMMs: every row times the weight of its own expert, in one launch, rounded as the rollout engine rounds.

The problem. A Mixture-of-Experts layer sends each token to a few of its E experts. Sorted by expert, the M rows that
result form E groups of unequal length, and group e must be multiplied by W[e]:

    y[m, n] = epilogue( sum_k x[m, k] * W[e(m), n, k] )       e(m): the expert with offsets[e] <= m < offsets[e + 1]

The lengths are the router's decision: known on the GPU only, different in every batch, and some are zero.

What is computed, by kernel (acc is FP32, r[m] the router weight of a row where one is given):

    bf16          acc = x @ W^T                               y = round(acc), round(acc * r), or
                                                              round(bf16(acc) * bf16(r))
    fp8_channel   acc = x8 @ w8^T                             y = bf16(w_scale[e, n] * (x_scale[m] * acc)), or
                                                              bf16(x_scale[m] * (w_scale[e, n] * acc)), or
                                                              bf16(fma(x_scale[m], w_scale[e, n] * acc, bias[n]))
    int8          the same of a sum in int32, which is exact, and acc * r after the scales
    fp8_block     acc += (x8 @ w8^T) * x_scale * w_scale      for each 128 of K; y = bf16(acc * r)

The epilogues look interchangeable and are not: each belongs to one vLLM kernel, and even the order in which two scales
are multiplied shows in the last bit. The reference in torch, `qarl_kernels.gemm`, defines what is right.
`transposed` contracts N in place of K and gives the input gradient dX = dY @ W from the same stored weight.

Why not the obvious alternatives:

- A loop over experts launches E small GEMMs, needs their sizes on the host (a synchronization in every layer, and no
  CUDA graph) and leaves most of the GPU idle when experts have few rows.
- Padding every expert to the longest one gives a batched GEMM that also multiplies the padding, and the more unequal
  the routing, the more of it there is.
- Padding every expert to whole tiles costs a copy of x and of y, whose size is again known on the GPU only.

Instead a small kernel lists the row tiles on the device (`tiles.py`: each tile's expert, first row and its expert's
end). The host needs only an upper bound, ceil(M / block_m) + E tiles, to size the table; the GEMM itself is a fixed
number of persistent programs, as many as fit on the device, and each takes every n-th tile until the list ends. The
copy engine (TMA) brings in whole boxes. The last tile of an expert therefore reads rows of its neighbour and multiplies
them by the wrong weight. That is harmless, because a tile is stored through a ragged descriptor that ends at the
expert's last row. So operands and result need neither masks nor padding.

What to know before changing it:

- One program sums all of K for its tile, in rising order. Split-K or atomics would let a token's result depend on
  timing or on the rest of the batch, and two forwards with the same weights would no longer agree.
- The tensor cores sum E4M3 products in an accumulator of their own with fewer bits than FP32. `fp8_channel` stays in it
  for all of K (fast accumulation); `fp8_block` leaves it after every 128 and adds in FP32 on the CUDA cores. vLLM's
  kernels do the same. Leaving it earlier would be more exact, and no longer the engine's arithmetic.
- A tile is chosen for speed and must not change what is computed. For `fp8_block`, block_k is 128 and block_n divides
  128, so that a tile meets one weight scale per K-block. Tiles come from `tuned/<device>.json`, which
  `tools/bench/kernels/tune.py` writes; a problem that is not in it takes the nearest one that is.
- Rows from offsets[E] on belong to no expert and are not written.
- TMA needs base addresses and row sizes in multiples of 16 bytes: hence K in multiples of 8 (BF16) or 16 (8 bits).
- Addresses are computed in 64 bits: expert * N * K overflows int32 at the sizes of real layers.
- This is plain Triton, one source for every GPU with a copy engine, without multicast or a schedule tuned to one chip.
  `operand_gemm.py` prefers `hopper_fp8.py` for FP8 on Hopper, which is faster and takes whole tiles of weights only.
  Packed int4 weights are `int4_gemm.py`, the weight gradient is `wgrad.py`.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from qarl_kernels.ops.checks import refuse
from qarl_kernels.ops.gemm_checks import bias_problems, epilogue_problems, operand_problems, scale_problems
from qarl_kernels.ops.gemm_kernels import grouped_gemm_fp8_block_kernel, grouped_gemm_kernel
from qarl_kernels.ops.launch import TileConfig, num_sms, tile_config
from qarl_kernels.ops.tiles import build_tile_table, descriptor

FP8_BLOCK = 128
# The kernels' epilogues, by where the router weight is rounded.
EPILOGUES = {None: 0, "on_accumulator": 1, "rounded_product": 2}


def launch_tiles(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    out: Tensor,
    config: TileConfig,
    pointers: tuple[Tensor | None, ...],
    *,
    w_box: tuple[int, int] | None = None,
    **constants: Any,
) -> Tensor:
    """Run a kernel with a given tile.

    Args:
        kernel: takes descriptors, the tile table, `pointers`, N, K, and as constants those of the tile and its own.
        x: [M, K].
        weight: [E, ...].
        offsets: [E + 1] int32.
        out: [M, N], written.
        config: the tile.
        pointers: what is read without the copy engine.
        w_box: what is loaded of an expert's weight at once; None: [block_n, block_k].
        **constants: the kernel's own.

    Returns:
        out.
    """
    (num_rows, k), n = x.shape, out.shape[1]
    if num_rows == 0:
        return out
    tiles = build_tile_table(offsets, num_rows, config.block_m)
    # All persistent programs that fit on the device, or one per tile if those are fewer.
    bound = (tiles.shape[0] - 1) * triton.cdiv(n, config.block_n)
    resident = num_sms(x.device.index if x.is_cuda else None) * config.programs_per_sm
    kernel[(min(bound, resident),)](
        descriptor(x, [config.block_m, config.block_k]),
        descriptor(weight, [1, *(w_box or (config.block_n, config.block_k))]),
        create_ragged_descriptor(out, [config.block_m, config.block_n // config.epilogue_split]),
        tiles,
        *pointers,
        n,
        k,
        **constants,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        FLATTEN=config.flatten,
        SPLIT=config.epilogue_split,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def launch_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    out: Tensor,
    config: TileConfig,
    *,
    transposed: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
    channel_first: bool = False,
    row_weight: Tensor | None = None,
    epilogue: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Run the BF16 kernel, which is FP8's and INT8's too, with a given tile (for the operators and for the tuner).

    Args:
        x: [M, K].
        weight: [E, N, K], or [E, K, N] if transposed.
        offsets: [E + 1] int32.
        out: [M, N], written.
        config: the tile.
        transposed: whether the weight's out-features are contracted.
        scales: FP32, the rows' [M] and the channels' [E, N]; None without.
        channel_first: multiply by the channels' before the rows'.
        row_weight: [M] FP32 if the epilogue has one.
        epilogue: a value of `EPILOGUES`.
        bias: [N] BF16, added before the result is rounded; with channel_first only.

    Returns:
        out.
    """
    w_box = (config.block_k, config.block_n) if transposed else (config.block_n, config.block_k)
    constants = {"SCALES": 0 if scales is None else 1 + channel_first, "EPILOGUE": epilogue, "TRANSPOSED": transposed}
    pointers = *(scales or (None, None)), row_weight, bias
    return launch_tiles(grouped_gemm_kernel, x, weight, offsets, out, config, pointers, w_box=w_box, **constants)


def launch_grouped_gemm_fp8_block(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    out: Tensor,
    config: TileConfig,
) -> Tensor:
    """Run the FP8 block kernel with a given tile (for the operator below and for the tuner).

    Args:
        a8: [M, K] E4M3.
        a_scale: [M, K / 128] FP32.
        w8: [E, N, K] E4M3.
        w_scale: [E, ceil(N / 128), K / 128] FP32.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 or None.
        out: [M, N], written.
        config: the tile; block_n divides 128, block_k is 128.

    Returns:
        out.
    """
    pointers, weighted = (a_scale, w_scale, row_weight), row_weight is not None
    return launch_tiles(grouped_gemm_fp8_block_kernel, a8, w8, offsets, out, config, pointers, WEIGHTED=weighted)


@torch.library.custom_op("qarl::grouped_gemm_bf16", mutates_args=())
def _bf16_op(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    transposed: bool,
    row_weight: Tensor | None,
    epilogue: int,
) -> Tensor:
    num_experts, n, k = weight.shape
    out = x.new_empty(x.shape[0], k if transposed else n)
    config = tile_config("bf16_transposed" if transposed else "bf16", x, n, k, num_experts)
    options = {"transposed": transposed, "epilogue": epilogue, "row_weight": row_weight}
    return launch_grouped_gemm(x, weight, offsets, out, config, **options)


@_bf16_op.register_fake
def _(x: Tensor, weight: Tensor, _: Tensor, transposed: bool, *__: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


def fake_rows(rows: Tensor, _: Tensor, weight: Tensor, *__: object) -> Tensor:
    """Return the result of a GEMM of scaled rows and weights without its numbers: [M, N] BF16."""
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("qarl::grouped_gemm_channel", mutates_args=())
def _channel_op(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    bias: Tensor | None,
    channel_first: bool,
) -> Tensor:
    num_experts, n, k = w8.shape
    out = a8.new_empty(a8.shape[0], n, dtype=torch.bfloat16)
    config = tile_config("int8" if a8.dtype == torch.int8 else "fp8_channel", a8, n, k, num_experts)
    options = {"scales": (a_scale, w_scale), "channel_first": channel_first, "row_weight": row_weight, "bias": bias}
    epilogue = EPILOGUES[None if row_weight is None else "on_accumulator"]
    return launch_grouped_gemm(a8, w8, offsets, out, config, epilogue=epilogue, **options)


_channel_op.register_fake(fake_rows)


@torch.library.custom_op("qarl::grouped_gemm_fp8_block", mutates_args=())
def _fp8_block_op(
    a8: Tensor, a_scale: Tensor, w8: Tensor, w_scale: Tensor, offsets: Tensor, row_weight: Tensor | None
) -> Tensor:
    num_experts, n, k = w8.shape
    out = a8.new_empty(a8.shape[0], n, dtype=torch.bfloat16)
    config = tile_config("fp8_block", a8, n, k, num_experts)
    return launch_grouped_gemm_fp8_block(a8, a_scale, w8, w_scale, offsets, row_weight, out, config)


_fp8_block_op.register_fake(fake_rows)


def grouped_gemm_bf16(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    transposed: bool = False,
    row_weight: Tensor | None = None,
    weight_rounding: str | None = None,
) -> Tensor:
    """Multiply BF16 rows by their expert's weight: y = round(x @ W^T), or x @ W if transposed (the input gradient).

    Args:
        x: [M, K] BF16, rows sorted by expert; [M, N] if transposed.
        weight: [E, N, K] BF16.
        offsets: [E + 1] int32; expert e owns rows offsets[e] to offsets[e + 1].
        transposed: contract the weight's out-features.
        row_weight: [M] FP32 factor of each row, or None.
        weight_rounding: with row_weight: `on_accumulator`, round(acc * w), or `rounded_product`, round(bf16(acc) *
            bf16(w)).

    Returns:
        [M, N] BF16; [M, K] if transposed.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.
    """
    problems = operand_problems(x, weight, offsets, torch.bfloat16, contracted=1 if transposed else 2, multiple=8)
    problems += epilogue_problems(x, row_weight, weight_rounding)
    refuse("grouped_gemm_bf16", problems)
    return _bf16_op(x, weight, offsets, transposed, row_weight, EPILOGUES[weight_rounding])


def grouped_gemm_channel(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    row_weight: Tensor | None = None,
    channel_first: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply E4M3 or INT8 rows by their expert's weight: y = bf16(w_scale * (a_scale * (a8 @ w8^T)) * row_weight).

    Sums of integers are exact, so neither tiles nor the order of K show in their result.

    Args:
        a8: [M, K] float8_e4m3fn or int8, rows sorted by expert.
        a_scale: [M, 1] FP32.
        w8: [E, N, K] of a8's dtype.
        w_scale: [E, N, 1] FP32.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 factor of each row, or None.
        channel_first: multiply by w_scale before a_scale, as for dense layers, which differs in the last bit.
        bias: [N] BF16, added in the same instruction that multiplies by a_scale; with channel_first only.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 scaled_mm_epilogues_c3x.hpp, fast accumulation (FP8, and dense); fused_moe.py,
    fused_moe_kernel (INT8 of experts).
    """
    dtype = torch.int8 if a8.dtype == torch.int8 else torch.float8_e4m3fn
    problems = operand_problems(a8, w8, offsets, dtype, contracted=2, multiple=16)
    problems += scale_problems("a_scale", a_scale, [a8.shape[0], 1])
    problems += scale_problems("w_scale", w_scale, [*w8.shape[:2], 1])
    if row_weight is not None:
        problems += scale_problems("row_weight", row_weight, [a8.shape[0]])
    problems += bias_problems(bias, w8.shape[1], channel_first=channel_first)
    refuse("grouped_gemm_channel", problems)
    return _channel_op(a8, a_scale, w8, w_scale, offsets, row_weight, bias, channel_first)


def grouped_gemm_fp8_block(
    a8: Tensor, a_scale: Tensor, w8: Tensor, w_scale: Tensor, offsets: Tensor, *, row_weight: Tensor | None = None
) -> Tensor:
    """Multiply E4M3 rows by their expert's weight: y = bf16(row_weight * sum_b (a8_b @ w8_b^T) * a_s * w_s).

    Args:
        a8: [M, K] float8_e4m3fn, rows sorted by expert.
        a_scale: [M, K / 128] FP32.
        w8: [E, N, K] float8_e4m3fn.
        w_scale: [E, ceil(N / 128), K / 128] FP32.
        offsets: [E + 1] int32.
        row_weight: [M] FP32 factor of each row, or None.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 fused_moe.py, fused_moe_kernel.
    """
    problems = operand_problems(a8, w8, offsets, torch.float8_e4m3fn, contracted=2, multiple=FP8_BLOCK)
    blocks = a8.shape[-1] // FP8_BLOCK
    problems += scale_problems("a_scale", a_scale, [a8.shape[0], blocks])
    problems += scale_problems("w_scale", w_scale, [w8.shape[0], -(-w8.shape[1] // FP8_BLOCK), blocks])
    if row_weight is not None:
        problems += scale_problems("row_weight", row_weight, [a8.shape[0]])
    refuse("grouped_gemm_fp8_block", problems)
    return _fp8_block_op(a8, a_scale, w8, w_scale, offsets, row_weight)
