"""Sum each token's k expert rows, weighted as the format does, and the gradients of that sum.

out[t] = bf16(sum_j term_j) with the terms of choice c = t * k + j taken from rows[inverse[c]], summed in FP32 in the
order of j; products and sums round separately, as in the torch reference. Every kernel runs over tokens and finds the
sorted rows by `inverse`: each row crosses the memory bus once, each sum belongs to one program (no atomics, the same
bits every run). In return the gradient of the weights needs a whole row in one program: at most 32768 columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.formats import RouterWeight
from qarl_kernels.ops.activations import MAX_COLUMNS
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
            else:
                term = term * weight
        # A sum that began at 0 would turn -0 into 0.
        if choice == 0:
            total = term
        else:
            total = total + term
    tl.store(out_ptr + token * H + column, total.to(tl.bfloat16), mask=column < H)


@triton.jit
def _combine_backward_kernel(
    grad_ptr,  # [T, H]
    rows_ptr,  # [T * TOP_K, H]
    inverse_ptr,  # [T * TOP_K]
    weights_ptr,  # [T, TOP_K]
    grad_rows_ptr,  # [T * TOP_K, H]
    grad_weights_ptr,  # [T, TOP_K]
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    MODE: tl.constexpr,
    WITH_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + token * H + column, mask=column < H, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + choice)
        weight = tl.load(weights_ptr + token * TOP_K + choice)
        if MODE == "rounded_product":
            weight = weight.to(tl.bfloat16).to(tl.float32)
        if WITH_WEIGHTS:
            values = tl.load(rows_ptr + row * H + column, mask=column < H, other=0.0).to(tl.float32)
        tl.store(grad_rows_ptr + row * H + column, (grad * weight).to(tl.bfloat16), mask=column < H)
        if WITH_WEIGHTS:
            grad_weight = tl.sum(grad * values, axis=0)
            if MODE == "on_accumulator":
                grad_weight = tl.where(weight == 0.0, 0.0, grad_weight / weight)
            tl.store(grad_weights_ptr + token * TOP_K + choice, grad_weight)


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
        inverse: [T * k] int64 of `RoutedRows`.
        weights: [T, k] FP32 router weights; None exactly where the sum is plain.
        router_weight: the format's `router_weight`; None is a plain sum.
        top_k: choices per token; needed without weights.

    Returns:
        [T, H] BF16.

    Raises:
        ValueError: shape, dtype, device or a combination of arguments is not supported.

    Source: `qarl_kernels.expert_mlp._combine`.
    """
    mode = router_weight or "on_accumulator"
    problems = tensor_problems("rows", rows, (torch.bfloat16,)) + _mode_problems(mode)
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


def combine_backward(
    grad_out: Tensor, rows: Tensor | None, inverse: Tensor, weights: Tensor, router_weight: RouterWeight
) -> tuple[Tensor, Tensor | None]:
    """Return grad_row = w * grad_out[token] and grad_weight = <grad_out[token], row>, accumulated in FP32.

    w is rounded to BF16 where the forward rounds it (`rounded_product`). For `on_accumulator` the GEMM took the
    product, row = w * accumulator: grad_row is the accumulator's gradient, and grad_weight is divided by w, or 0
    where w = 0.

    Args:
        grad_out: [T, H] BF16 or FP32, contiguous, H at most 32768.
        rows: [T * k, H] BF16, what `combine_rows` summed; None where no gradient of the weights is needed.
        inverse: [T * k] int64 of `RoutedRows`.
        weights: [T, k] FP32 router weights.
        router_weight: the format's `router_weight`.

    Returns:
        grad_rows: [T * k, H] BF16; grad_weights: [T, k] FP32, or None without rows.

    Raises:
        ValueError: shape, dtype or device is not supported.
    """
    problems = tensor_problems("grad_out", grad_out, (torch.bfloat16, torch.float32)) + _mode_problems(router_weight)
    problems += tensor_problems("weights", weights, (torch.float32,))
    if rows is not None:
        problems += tensor_problems("rows", rows, (torch.bfloat16,))
    if grad_out.dim() == 2 and weights.dim() == 2:
        num_tokens, columns = grad_out.shape
        top_k = weights.shape[1]
        problems += _shape_problems("weights", weights, (num_tokens, max(top_k, 1)))
        problems += permutation_problems("inverse", inverse, num_tokens, top_k)
        if not 1 <= columns <= MAX_COLUMNS:
            problems.append(f"grad_out has {columns} columns (legal: 1 .. {MAX_COLUMNS})")
        if rows is not None:
            problems += _shape_problems("rows", rows, (num_tokens * top_k, columns))
    refuse("combine_backward", problems)
    if rows is None:
        return _weight_rows(grad_out, inverse, weights, router_weight), None
    return _combine_backward(grad_out, rows, inverse, weights, router_weight)


def _mode_problems(mode: str) -> list[str]:
    if mode in ROUTER_WEIGHTS:
        return []
    return [f"router_weight={mode!r} (legal: {', '.join(ROUTER_WEIGHTS)})"]


def _shape_problems(name: str, tensor: Tensor, legal: tuple[int, int]) -> list[str]:
    return [] if tuple(tensor.shape) == legal else [f"{name} has shape {list(tensor.shape)} (legal: {list(legal)})"]


@torch.library.custom_op("qarl::combine_rows", mutates_args=())
def _combine_rows(rows: Tensor, inverse: Tensor, weights: Tensor | None, mode: str, top_k: int) -> Tensor:
    out = _combine_rows_fake(rows, inverse, weights, mode, top_k)
    num_tokens, columns = out.shape
    block = min(triton.next_power_of_2(columns), _COLUMNS_PER_PROGRAM)
    # Fused multiply-adds would skip the rounding of the products.
    _combine_rows_kernel[(num_tokens, triton.cdiv(columns, block))](
        rows, inverse, weights, out, columns, top_k, mode, block, num_warps=4, enable_fp_fusion=False
    )
    return out


@_combine_rows.register_fake
def _combine_rows_fake(
    rows: Tensor,
    inverse: Tensor,  # noqa: ARG001
    weights: Tensor | None,  # noqa: ARG001
    mode: str,  # noqa: ARG001
    top_k: int,
) -> Tensor:
    return rows.new_empty(rows.shape[0] // top_k, rows.shape[1])


@torch.library.custom_op("qarl::combine_backward", mutates_args=())
def _combine_backward(
    grad_out: Tensor, rows: Tensor, inverse: Tensor, weights: Tensor, mode: str
) -> tuple[Tensor, Tensor]:
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    _launch_backward(grad_out, rows, inverse, weights, grad_rows, grad_weights, mode)
    return grad_rows, grad_weights


@_combine_backward.register_fake
def _combine_backward_fake(
    grad_out: Tensor,  # noqa: ARG001
    rows: Tensor,
    inverse: Tensor,  # noqa: ARG001
    weights: Tensor,
    mode: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


@torch.library.custom_op("qarl::weight_rows", mutates_args=())
def _weight_rows(grad_out: Tensor, inverse: Tensor, weights: Tensor, mode: str) -> Tensor:
    grad_rows = _weight_rows_fake(grad_out, inverse, weights, mode)
    _launch_backward(grad_out, None, inverse, weights, grad_rows, None, mode)
    return grad_rows


@_weight_rows.register_fake
def _weight_rows_fake(grad_out: Tensor, inverse: Tensor, weights: Tensor, mode: str) -> Tensor:  # noqa: ARG001
    return grad_out.new_empty(inverse.shape[0], grad_out.shape[1], dtype=torch.bfloat16)


def _launch_backward(
    grad_out: Tensor,
    rows: Tensor | None,
    inverse: Tensor,
    weights: Tensor,
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    mode: str,
) -> None:
    num_tokens, columns = grad_out.shape
    block = triton.next_power_of_2(columns)
    num_warps = max(1, block // _COLUMNS_PER_PROGRAM)
    _combine_backward_kernel[(num_tokens,)](
        grad_out,
        rows,
        inverse,
        weights,
        grad_rows,
        grad_weights,
        columns,
        weights.shape[1],
        mode,
        rows is not None,
        block,
        num_warps=num_warps,
    )
