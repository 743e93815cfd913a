"""The expert MLP in the rollout engine's order of operations.

fc1 -> SwiGLU (rounded as the engine rounds it) -> [quantize activations] -> fc2 -> router weight -> sum over experts.
The router weight is FP32 and multiplied after fc2; where it is rounded depends on the format (`qarl_formats`).
The two GEMMs are arguments, so the learner (autograd) and the sampler (packed tensors) run this same function.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qarl_formats import QuantFormat
from qarl_kernels.low_rank import ExpertAdapters, low_rank, low_rank_gate_up
from qarl_kernels.routing import route_rows

GroupedGemm = Callable[[Tensor, Tensor, torch.dtype], Tensor]
# Below it exp(-gate) is infinite in FP32 and the sigmoid 0, whose gradient would be 0 * inf.
_LEAST_GATE = -88.72283172607422


def expert_mlp_reference(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    fc1: GroupedGemm,
    fc2: GroupedGemm,
    fmt: QuantFormat,
    num_experts: int,
    adapters: ExpertAdapters | None = None,
    *,
    fc2_scale: Tensor | None = None,
) -> Tensor:
    """Run routed tokens through their experts and sum the weighted outputs.

    Args:
        x: [T, H] activations.
        topk_index: [T, k] int64.
        topk_weight: [T, k] FP32 router weights.
        fc1: rows [M, H], offsets, out dtype -> [M, 2 I], gate rows before up rows.
        fc2: rows [M, I], offsets, out dtype -> [M, H].
        fmt: decides the rounding points.
        num_experts: E.
        adapters: added beside both GEMMs; None without.
        fc2_scale: [E, 1, 1] FP32 factors that fc2 leaves to the router weights (`scaled_product`).

    Returns:
        [T, H] in x's dtype.
    """
    num_tokens, top_k = topk_index.shape
    routed = route_rows(topk_index, num_experts)
    rows = x[routed.order // top_k]
    gate_up = fc1(rows, routed.offsets, x.dtype)
    if adapters is not None:
        gate_up = gate_up + low_rank_gate_up(rows, adapters, routed.offsets)
    hidden = swiglu(gate_up, fmt, fused=adapters is None)
    on_accumulator = fmt.router_weight == "on_accumulator"
    out_rows = fc2(hidden, routed.offsets, torch.float32 if on_accumulator else x.dtype)
    choices = out_rows[routed.inverse].view(num_tokens, top_k, out_rows.shape[-1])
    added = None
    if adapters is not None:
        added = low_rank(hidden, adapters.down, routed.offsets, out_dtype=_accumulated(x.dtype))
        added = added[routed.inverse].view_as(choices)
    scale = None if fc2_scale is None else fc2_scale.flatten()[topk_index].unsqueeze(-1)
    return combine_choices(choices, topk_weight.float().unsqueeze(-1), fmt, x.dtype, added, scale)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def swiglu(hidden: Tensor, fmt: QuantFormat, *, fused: bool = True) -> Tensor:
    """Return silu(gate) * up, rounded after each factor, or in FP32 unrounded where the engine fuses it (fp8_block).

    Args:
        hidden: [M, 2 I], gate columns before up columns.
        fmt: the format.
        fused: whether the engine may fuse it with fc2's quantizer; with adapters, which need it rounded, it does not.

    Returns:
        [M, I] in hidden's dtype; FP32 for fused fp8_block.
    """
    gate, up = hidden.chunk(2, dim=-1)
    if fused and fmt.weight_kind == "fp8_blocks":
        # The engine's fused kernel multiplies by the sigmoid, its plain one divides: the last bits differ.
        wide = gate.float()
        sigmoid = 1.0 / (1.0 + torch.exp(-wide.clamp(min=_LEAST_GATE)))
        return wide * torch.where(wide < _LEAST_GATE, 0.0, sigmoid) * up.float()
    return torch.nn.functional.silu(gate) * up


def combine_choices(
    choices: Tensor,
    weight: Tensor,
    fmt: QuantFormat,
    dtype: torch.dtype,
    added: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Weight each token's expert outputs as the format does, and sum them in the order of its choices.

    Args:
        choices: [T, k, H] fc2 outputs; FP32 accumulators where the format weights those.
        weight: [T, k, 1] FP32.
        fmt: decides the rounding points.
        dtype: the result's dtype.
        added: [T, k, H] unrounded outputs of fc2's adapters; None without.
        scale: [T, k, 1] FP32 scales that fc2 left out, multiplied with the weight at once (`scaled_product`).

    Returns:
        [T, H].
    """
    if fmt.router_weight == "weighted_sum":
        choices = choices if added is None else choices + added.to(dtype)
        return _fused_sum(choices, weight).to(dtype)
    if fmt.router_weight in ("rounded_product", "scaled_product"):
        weighted = (choices * (weight if scale is None else weight * scale).to(dtype)).float()
    else:
        weighted = (choices * weight).to(dtype).float()
    if added is not None:
        weighted = (weighted + (added * weight).to(dtype)).to(dtype).float()
    return sum_in_order(weighted).to(dtype)


def sum_in_order(terms: Tensor) -> Tensor:
    """Return the sum over dimension 1, first term first: [T, k, H] -> [T, H]."""
    total = terms[:, 0]
    for choice in range(1, terms.shape[1]):
        total = total + terms[:, choice]
    return total


def _fused_sum(choices: Tensor, weight: Tensor) -> Tensor:
    # The engine uses fused multiply-adds. In float64 a product of two FP32 numbers is exact, so only the sum rounds.
    total = weight[:, 0] * choices[:, 0].float()
    for choice in range(1, choices.shape[1]):
        total = (total.double() + weight[:, choice].double() * choices[:, choice].double()).float()
    return total
