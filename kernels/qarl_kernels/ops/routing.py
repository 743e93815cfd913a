"""Copy the tokens' rows to their experts: the k choices c = t * k + j of T tokens, sorted by expert.

rows[inverse[c]] = x[c // k]. The kernel runs over tokens, not over sorted rows: it reads each row once and writes it k
times. Rows are copied as 4-byte words, so that one kernel serves BF16, FP32 and FP8.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.checks import refuse, tensor_problems

_WORD_BYTES = 4
_ELEMENTS_PER_PROGRAM = 1024


@triton.jit
def _spread_rows_kernel(
    x_ptr,  # [T, WORDS]
    inverse_ptr,  # [T * TOP_K]
    out_ptr,  # [T * TOP_K, WORDS]
    num_tokens,
    WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    mask = exists[:, None] & (column < WORDS)[None, :]
    words = tl.load(x_ptr + token[:, None] * WORDS + column[None, :], mask=mask, other=0)
    for choice in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + choice, mask=exists, other=0)
        tl.store(out_ptr + row[:, None] * WORDS + column[None, :], words, mask=mask)


def spread_rows(x: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Return the tokens' rows sorted by expert: out[inverse[c]] = x[c // top_k].

    Its backward is `combine_rows` without weights.

    Args:
        x: [T, H] BF16, FP32, float8_e4m3fn or int8, contiguous, a row's bytes a multiple of 4.
        inverse: [T * top_k] int64 from `RoutedRows`.
        top_k: choices per token.

    Returns:
        [T * top_k, H] of x's dtype.

    Raises:
        ValueError: shape, dtype or device is not supported.
    """
    refuse("spread_rows", _copy_problems(x, inverse, top_k))
    return _spread_rows(x, inverse, top_k)


def permutation_problems(name: str, permutation: Tensor, num_tokens: int, top_k: int) -> list[str]:
    """List what keeps a tensor from being a permutation of all choices, without reading its values.

    Args:
        name: the argument's name in messages.
        permutation: the argument.
        num_tokens: T.
        top_k: k.

    Returns:
        One message per problem, empty if there is none.
    """
    problems = tensor_problems(name, permutation, (torch.int64,), 1)
    if top_k < 1:
        problems.append(f"top_k={top_k} (legal: at least 1)")
    if permutation.numel() != num_tokens * top_k:
        problems.append(f"{name} has {permutation.numel()} rows (legal for {num_tokens} tokens: {num_tokens * top_k})")
    return problems


def _copy_problems(x: Tensor, inverse: Tensor, top_k: int) -> list[str]:
    problems = tensor_problems("x", x, (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8))
    if x.dim() == 2:
        problems += permutation_problems("inverse", inverse, x.shape[0], top_k)
        if not x.shape[1] or x.shape[1] * x.element_size() % _WORD_BYTES:
            problems.append(f"x has {x.shape[1]} columns of {x.dtype} (legal: rows of a multiple of 4 bytes)")
    return problems


@torch.library.custom_op("qarl::spread_rows", mutates_args=())
def _spread_rows(x: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    out = _spread_rows_fake(x, inverse, top_k)
    source, target = x.view(torch.int32), out.view(torch.int32)
    words = source.shape[1]
    block = min(triton.next_power_of_2(words), _ELEMENTS_PER_PROGRAM)
    tokens = _ELEMENTS_PER_PROGRAM // block
    grid = (triton.cdiv(len(x), tokens), triton.cdiv(words, block))
    _spread_rows_kernel[grid](source, inverse, target, len(x), words, top_k, tokens, block, num_warps=4)
    return out


@_spread_rows.register_fake
def _spread_rows_fake(x: Tensor, inverse: Tensor, top_k: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0] * top_k, x.shape[1])
