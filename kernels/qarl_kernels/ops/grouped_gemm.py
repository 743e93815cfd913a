"""Grouped GEMMs over ragged experts: y[m] = epilogue(sum_k x[m, k] * W[e(m), n, k]), rows sorted by expert.

`bf16`: BF16 operands. `fp8_channel`: E4M3, y = w_scale * (x_scale * acc). `fp8_block`: E4M3, acc += dot * x_scale *
w_scale for each 128 of K, outside the tensor cores. FP32 accumulation; E4M3 products are summed in the tensor cores'
own, shorter accumulator over all of K (`fp8_channel`) or 128 of it (`fp8_block`), as the rollout engine's kernels do.
Plain Triton: one source for every GPU with a copy engine, which leaves multicast and a tuned schedule to others.
"""

import torch
import triton
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_kernels.ops.checks import refuse
from qarl_kernels.ops.gemm_checks import epilogue_problems, operand_problems, scale_problems
from qarl_kernels.ops.gemm_kernels import grouped_gemm_fp8_block_kernel, grouped_gemm_kernel
from qarl_kernels.ops.launch import TileConfig, num_sms, tile_config
from qarl_kernels.ops.tiles import build_tile_table, descriptor

FP8_BLOCK = 128
# The kernels' epilogues: by where the router weight is rounded, and the FP8 channel scales.
EPILOGUES = {None: 0, "on_accumulator": 1, "rounded_product": 2}
_TOKEN_THEN_CHANNEL, _CHANNEL_THEN_TOKEN = 3, 4


def launch_grid(x: Tensor, tiles: Tensor, n: int, config: TileConfig) -> tuple[int]:
    """Return the number of persistent programs: all that fit on the device, or one per tile if those are fewer.

    Args:
        x: [M, K], for its device.
        tiles: the tile table.
        n: columns of the result.
        config: the tile.

    Returns:
        The grid.
    """
    bound = (tiles.shape[0] - 1) * triton.cdiv(n, config.block_n)
    return (min(bound, num_sms(x.device.index if x.is_cuda else None) * config.programs_per_sm),)


def output_descriptor(out: Tensor, config: TileConfig) -> TensorDescriptor:
    """Describe the result to the copy engine, so that a store can end at any row.

    Args:
        out: [M, N] contiguous.
        config: the tile.

    Returns:
        The ragged descriptor that `store_tile` takes.
    """
    return create_ragged_descriptor(out, [config.block_m, config.block_n // config.epilogue_split])


def compile_options(config: TileConfig) -> dict[str, int | bool]:
    """Return the compile-time arguments that every GEMM kernel takes from its tile.

    Args:
        config: the tile.

    Returns:
        Keyword arguments of the launch.
    """
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUP_M": config.group_m,
        "FLATTEN": config.flatten,
        "SPLIT": config.epilogue_split,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def launch_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    out: Tensor,
    config: TileConfig,
    *,
    transposed: bool = False,
    epilogue: int = 0,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
) -> Tensor:
    """Run the BF16 or FP8 channel kernel with a given tile (for the operators below and for the tuner).

    Args:
        x: [M, K].
        weight: [E, N, K], or [E, K, N] if transposed.
        offsets: [E + 1] int32.
        out: [M, N], written.
        config: the tile.
        transposed: whether the weight's out-features are contracted.
        epilogue: a value of `EPILOGUES`, or 3 for row and then column scales, 4 for column and then row scales.
        row_scale: [M] FP32 if the epilogue has one.
        column_scale: [E, N] FP32 for epilogues 3 and 4.

    Returns:
        out.
    """
    (num_rows, k), n = x.shape, out.shape[1]
    if num_rows == 0:
        return out
    tiles = build_tile_table(offsets, num_rows, config.block_m)
    w_block = [1, config.block_k, config.block_n] if transposed else [1, config.block_n, config.block_k]
    grouped_gemm_kernel[launch_grid(x, tiles, n, config)](
        descriptor(x, [config.block_m, config.block_k]),
        descriptor(weight, w_block),
        output_descriptor(out, config),
        tiles,
        row_scale,
        column_scale,
        n,
        k,
        EPILOGUE=epilogue,
        TRANSPOSED=transposed,
        BLOCK_K=config.block_k,
        **compile_options(config),
    )
    return out


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
    (num_rows, k), n = a8.shape, out.shape[1]
    if num_rows == 0:
        return out
    tiles = build_tile_table(offsets, num_rows, config.block_m)
    grouped_gemm_fp8_block_kernel[launch_grid(a8, tiles, n, config)](
        descriptor(a8, [config.block_m, FP8_BLOCK]),
        descriptor(w8, [1, config.block_n, FP8_BLOCK]),
        output_descriptor(out, config),
        tiles,
        a_scale,
        w_scale,
        row_weight,
        n,
        k,
        WEIGHTED=row_weight is not None,
        **compile_options(config),
    )
    return out


@torch.library.custom_op("qarl::grouped_gemm_bf16", mutates_args=())
def _bf16_op(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    transposed: bool,
    row_weight: Tensor | None,
    epilogue: int,
    out_dtype: torch.dtype,
) -> Tensor:
    num_experts, n, k = weight.shape
    out = x.new_empty(x.shape[0], k if transposed else n, dtype=out_dtype)
    config = tile_config("bf16_transposed" if transposed else "bf16", x, n, k, num_experts, out_dtype)
    options = {"transposed": transposed, "epilogue": epilogue, "row_scale": row_weight}
    return launch_grouped_gemm(x, weight, offsets, out, config, **options)


@_bf16_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,  # noqa: ARG001
    transposed: bool,
    row_weight: Tensor | None,  # noqa: ARG001
    epilogue: int,  # noqa: ARG001
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1], dtype=out_dtype)


@torch.library.custom_op("qarl::grouped_gemm_fp8_channel", mutates_args=())
def _fp8_channel_op(
    a8: Tensor, a_scale: Tensor, w8: Tensor, w_scale: Tensor, offsets: Tensor, channel_first: bool
) -> Tensor:
    num_experts, n, k = w8.shape
    out = a8.new_empty(a8.shape[0], n, dtype=torch.bfloat16)
    config = tile_config("fp8_channel", a8, n, k, num_experts)
    scales = {"row_scale": a_scale, "column_scale": w_scale}
    epilogue = _CHANNEL_THEN_TOKEN if channel_first else _TOKEN_THEN_CHANNEL
    return launch_grouped_gemm(a8, w8, offsets, out, config, epilogue=epilogue, **scales)


@_fp8_channel_op.register_fake
def _(
    a8: Tensor,
    a_scale: Tensor,  # noqa: ARG001
    w8: Tensor,
    w_scale: Tensor,  # noqa: ARG001
    offsets: Tensor,  # noqa: ARG001
    channel_first: bool,  # noqa: ARG001
) -> Tensor:
    return a8.new_empty(a8.shape[0], w8.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("qarl::grouped_gemm_fp8_block", mutates_args=())
def _fp8_block_op(
    a8: Tensor, a_scale: Tensor, w8: Tensor, w_scale: Tensor, offsets: Tensor, row_weight: Tensor | None
) -> Tensor:
    num_experts, n, k = w8.shape
    out = a8.new_empty(a8.shape[0], n, dtype=torch.bfloat16)
    config = tile_config("fp8_block", a8, n, k, num_experts)
    return launch_grouped_gemm_fp8_block(a8, a_scale, w8, w_scale, offsets, row_weight, out, config)


@_fp8_block_op.register_fake
def _(
    a8: Tensor,
    a_scale: Tensor,  # noqa: ARG001
    w8: Tensor,
    w_scale: Tensor,  # noqa: ARG001
    offsets: Tensor,  # noqa: ARG001
    row_weight: Tensor | None,  # noqa: ARG001
) -> Tensor:
    return a8.new_empty(a8.shape[0], w8.shape[1], dtype=torch.bfloat16)


def grouped_gemm_bf16(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    transposed: bool = False,
    row_weight: Tensor | None = None,
    weight_rounding: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
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
        out_dtype: BF16 or FP32.

    Returns:
        [M, N] in out_dtype; [M, K] if transposed.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.
    """
    problems = operand_problems(x, weight, offsets, torch.bfloat16, contracted=1 if transposed else 2, multiple=8)
    problems += epilogue_problems(x, row_weight, weight_rounding)
    if out_dtype not in (torch.bfloat16, torch.float32):
        problems.append(f"out_dtype is {out_dtype} (legal: torch.bfloat16, torch.float32)")
    refuse("grouped_gemm_bf16", problems)
    return _bf16_op(x, weight, offsets, transposed, row_weight, EPILOGUES[weight_rounding], out_dtype)


def grouped_gemm_fp8_channel(
    a8: Tensor, a_scale: Tensor, w8: Tensor, w_scale: Tensor, offsets: Tensor, *, channel_first: bool = False
) -> Tensor:
    """Multiply E4M3 rows by their expert's weight: y = bf16(w_scale * (a_scale * (a8 @ w8^T))).

    Args:
        a8: [M, K] float8_e4m3fn, rows sorted by expert.
        a_scale: [M, 1] FP32.
        w8: [E, N, K] float8_e4m3fn.
        w_scale: [E, N, 1] FP32.
        offsets: [E + 1] int32.
        channel_first: multiply by w_scale before a_scale, which differs in the last bit.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 scaled_mm_epilogues_c3x.hpp, fast accumulation.
    """
    problems = operand_problems(a8, w8, offsets, torch.float8_e4m3fn, contracted=2, multiple=16)
    problems += scale_problems("a_scale", a_scale, [a8.shape[0], 1])
    problems += scale_problems("w_scale", w_scale, [*w8.shape[:2], 1])
    refuse("grouped_gemm_fp8_channel", problems)
    return _fp8_channel_op(a8, a_scale, w8, w_scale, offsets, channel_first)


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
