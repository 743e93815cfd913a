"""RMSNorm with the rollout engine's order of additions: y = bf16(x * rsqrt(mean(x^2) + eps) * w), FP32 inside.

The engine's thread t adds the squares of elements 8 t to 8 t + 7 one after the other or, in the kernel that first adds
the residual, in pairs. A warp's 32 sums are added as neighbours, then neighbours of neighbours and so on; the warps'
sums are added one after the other. The square of a BF16 number is exact in FP32, so only additions round.
This is the order for one vector per thread, which the engine uses for up to 2048 columns and, in batches of fewer than
256 tokens, for up to 8192.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.checks import refuse, tensor_problems

_VECTOR, _WARP = 8, 32
MAX_NORM_COLUMNS = 1024 * _VECTOR
_ELEMENTS = 2048  # that one program takes if rows are shorter


@triton.jit
def sum_of_squares(
    x_ptr, row, M, H: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, LEVELS: tl.constexpr, PAIRS: tl.constexpr
):
    """FP32 sums [ROWS] of the squares of rows of x [M, H], in the engine's order; a warp has 2^LEVELS threads."""
    first = tl.arange(0, THREADS) * 8
    inside = (row < M)[:, None] & (first < H)[None, :]
    to_vector = x_ptr + row[:, None] * H + first[None, :]
    sums = tl.zeros([ROWS, THREADS], tl.float32)
    for place in tl.static_range(0, 8, 2):
        left = tl.load(to_vector + place, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(to_vector + place + 1, mask=inside, other=0.0).to(tl.float32)
        if PAIRS:
            sums = sums + (left * left + right * right)
        else:
            sums = sums + left * left
            sums = sums + right * right
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(sums, [ROWS, THREADS >> (level + 1), 2]))
        sums = left + right
    warp = tl.arange(0, THREADS >> LEVELS)
    total = tl.zeros([ROWS], tl.float32)
    for index in tl.static_range(THREADS >> LEVELS):
        total = total + tl.sum(tl.where((warp == index)[None, :], sums, 0.0), axis=1)
    return total


@triton.jit
def _norm_kernel(
    x_ptr,  # [M, H]
    weight_ptr,  # [H]
    out_ptr,  # [M, H]
    M,
    eps,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    LEVELS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = sum_of_squares(x_ptr, row, M, H, ROWS, THREADS, LEVELS, PAIRS)
    scale = tl.rsqrt(tl.math.div_rn(total, H * 1.0) + eps)
    column = tl.arange(0, COLUMNS)
    mask = (row < M)[:, None] & (column < H)[None, :]
    x = tl.load(x_ptr + row[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * H + column[None, :], out.to(tl.bfloat16), mask=mask)


def norm_layout(num_columns: int) -> dict[str, int]:
    """Return how many rows a program takes, and the engine's threads per row and levels of a warp's sum.

    Args:
        num_columns: H.

    Returns:
        ROWS, THREADS and LEVELS of the kernel; threads without a vector add zeros.
    """
    columns = triton.next_power_of_2(num_columns)
    threads = max(columns // _VECTOR, 2)
    return {
        "ROWS": max(_ELEMENTS // columns, 1),
        "THREADS": threads,
        "LEVELS": min(threads, _WARP).bit_length() - 1,
    }


def rms_norm_in_engine_order(x: Tensor, weight: Tensor, eps: float, *, after_add: bool) -> Tensor:
    """Normalize rows: y = bf16(x * rsqrt(mean(x^2) + eps) * w).

    Args:
        x: [M, H] BF16; H a multiple of 8, at most `MAX_NORM_COLUMNS`.
        weight: [H] BF16.
        eps: added to the mean square.
        after_add: follow the engine's kernel that first adds the residual, which adds squares in pairs.

    Returns:
        [M, H] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 csrc/libtorch_stable/layernorm_kernels.cu, cub::BlockReduce.
    """
    problems = tensor_problems("x", x, (torch.bfloat16,)) + tensor_problems("weight", weight, (torch.bfloat16,), 1)
    if weight.shape != x.shape[-1:]:
        problems.append(f"weight has shape {list(weight.shape)} (legal: {list(x.shape[-1:])})")
    if x.shape[-1] % _VECTOR or x.shape[-1] > MAX_NORM_COLUMNS:
        problems.append(f"x has {x.shape[-1]} columns (legal: multiples of {_VECTOR} up to {MAX_NORM_COLUMNS})")
    refuse("rms_norm_in_engine_order", problems)
    return _norm_op(x, weight, eps, after_add)


@torch.library.custom_op("qarl::rms_norm_in_engine_order", mutates_args=())
def _norm_op(x: Tensor, weight: Tensor, eps: float, after_add: bool) -> Tensor:
    (num_rows, num_columns), out = x.shape, torch.empty_like(x)
    if num_rows == 0:
        return out
    layout = norm_layout(num_columns)
    grid = (triton.cdiv(num_rows, layout["ROWS"]),)
    columns = triton.next_power_of_2(num_columns)
    _norm_kernel[grid](x, weight, out, num_rows, eps, H=num_columns, COLUMNS=columns, PAIRS=after_add, **layout)
    return out


@_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float, after_add: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)
