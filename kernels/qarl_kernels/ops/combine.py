"""Sum each token's k expert rows, weighted as the format does.

out[t] = bf16(sum_j term_j) with the terms of choice c = t * k + j taken from rows[inverse[c]], summed in FP32 in the
order of j; `weighted_sum` adds with fused multiply-adds, as the engine does. The kernel runs over tokens and finds the
sorted rows by `inverse`: each row crosses the memory bus once, and each sum belongs to one program (no atomics, so the
same bits in every run). Without weights it is also the gradient of `spread_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_formats import RouterWeight
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.routing import permutation_problems

ROUTER_WEIGHTS = ("rounded_product", "weighted_sum", "on_accumulator")
_COLUMNS_PER_PROGRAM = 1024


@triton.jit
def _combine_rows_kernel(
    rows_ptr,  # [T * TOP_K, H]
    inverse_ptr,  # [T * TOP_K]
    weights_ptr,  # [T, TOP_K]
    out_ptr,  # [T, H]
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for choice in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + choice)
        term = tl.load(rows_ptr + row * H + column, mask=column < H, other=0.0).to(tl.float32)
        if MODE != "on_accumulator":
            weight = tl.load(weights_ptr + token * TOP_K + choice)
        if MODE == "rounded_product":
            term = (term * weight.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
        # Starting the sum at 0 would turn -0 into 0.
        if choice == 0:
            total = weight * term if MODE == "weighted_sum" else term
        elif MODE == "weighted_sum":
            total = tl.fma(weight, term, total)
        else:
            total = total + term
    tl.store(out_ptr + token * H + column, total.to(tl.bfloat16), mask=column < H)


def combine_rows(
    rows: Tensor,
    inverse: Tensor,
    weights: Tensor | None,
    router_weight: RouterWeight | None,
    *,
    top_k: int | None = None,
) -> Tensor:
    """Sum each token's rows in FP32, in the order of its choices, and round once.

    out[t] = bf16(sum_j term_j) with term_j = bf16(row * bf16(w)) for `rounded_product`, w * row for `weighted_sum` and
    row for `on_accumulator` (the GEMM multiplied already) and None.

    Args:
        rows: [T * k, H] BF16, contiguous, sorted by expert.
        inverse: [T * k] int64 from `RoutedRows`.
        weights: [T, k] FP32 router weights; None for a plain sum only.
        router_weight: the format's `router_weight`; None is a plain sum.
        top_k: choices per token; needed without weights.

    Returns:
        [T, H] BF16.

    Raises:
        ValueError: shape, dtype, device or a combination of arguments is not supported.

    Source: `qarl_kernels.expert_mlp.combine_choices`.
    """
    mode = router_weight or "on_accumulator"
    problems = tensor_problems("rows", rows, (torch.bfloat16,))
    if mode not in ROUTER_WEIGHTS:
        problems.append(f"router_weight={mode!r} (legal: {', '.join(ROUTER_WEIGHTS)})")
    if (weights is None) != (mode == "on_accumulator"):
        problems.append(
            f"weights are {'missing' if weights is None else 'given'} for router_weight={router_weight!r} "
            "(legal: weights for rounded_product and weighted_sum, None for on_accumulator and None)"
        )
    if weights is not None:
        problems += tensor_problems("weights", weights, (torch.float32,))
        top_k = weights.shape[-1] if weights.dim() else None
    if not top_k or top_k < 1:
        problems.append(f"top_k is {top_k} (legal: at least 1, given wherever weights are None)")
    elif rows.dim() == 2:
        num_tokens = rows.shape[0] // top_k
        problems += permutation_problems("inverse", inverse, num_tokens, top_k)
        problems += _shape_problems("rows", rows, (num_tokens * top_k, max(rows.shape[1], 1)))
        if weights is not None:
            problems += _shape_problems("weights", weights, (num_tokens, top_k))
    refuse("combine_rows", problems)
    return _combine_rows(rows, inverse, weights, mode, top_k)


def _shape_problems(name: str, tensor: Tensor, legal: tuple[int, int]) -> list[str]:
    return [] if tuple(tensor.shape) == legal else [f"{name} has shape {list(tensor.shape)} (legal: {list(legal)})"]


@torch.library.custom_op("qarl::combine_rows", mutates_args=())
def _combine_rows(rows: Tensor, inverse: Tensor, weights: Tensor | None, mode: str, top_k: int) -> Tensor:
    out = _combine_rows_fake(rows, inverse, weights, mode, top_k)
    num_tokens, columns = out.shape
    block = min(triton.next_power_of_2(columns), _COLUMNS_PER_PROGRAM)
    _combine_rows_kernel[(num_tokens, triton.cdiv(columns, block))](
        rows,
        inverse,
        weights,
        out,
        columns,
        top_k,
        mode,
        block,
        num_warps=4,
        # Fused, a product would enter the sum without its rounding to BF16.
        enable_fp_fusion=False,
    )
    return out


@_combine_rows.register_fake
def _combine_rows_fake(rows: Tensor, _: Tensor, __: Tensor | None, ___: str, top_k: int) -> Tensor:
    return rows.new_empty(rows.shape[0] // top_k, rows.shape[1])
