"""Rows sorted by expert: where each routed choice goes, on the device and without a synchronization."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The order of T * k routed choices as rows sorted by expert.

    Attributes:
        order: [T * k] int64, position of each row in the flattened [T, k] choices.
        inverse: [T * k] int64, row of each choice.
        offsets: [E + 1] int32 on the device; expert e owns rows offsets[e] to offsets[e+1].
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor


def route_rows(topk_index: Tensor, num_experts: int) -> RoutedRows:
    """Sort the T * k choices by expert, stable in token order.

    Args:
        topk_index: [T, k] int64 expert of each choice.
        num_experts: E.

    Returns:
        The permutation, its inverse and the experts' offsets.

    Raises:
        ValueError: on a CPU, an expert outside of 0 .. E - 1; on a GPU looking would wait for the device, and rows of
            such a choice are never written.
    """
    if not topk_index.is_cuda and topk_index.numel() and not torch.compiler.is_compiling():
        least, most = (int(bound) for bound in topk_index.aminmax())
        if least < 0 or most >= num_experts:
            raise ValueError(f"topk_index has experts from {least} to {most} (legal: 0 .. {num_experts - 1})")
    # Narrow keys need fewer passes of the radix sort.
    key_dtype = torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32
    experts, order = topk_index.reshape(-1).to(key_dtype).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    # Unlike bincount, searchsorted knows the size of its result without reading the device.
    bounds = torch.arange(num_experts + 1, dtype=key_dtype, device=order.device)
    return RoutedRows(order, inverse, torch.searchsorted(experts, bounds, out_int32=True))


def one_group(x: Tensor) -> Tensor:
    """Return the offsets [0, M] of a dense layer's rows x [M, K], as int32 on x's device."""
    return torch.arange(2, dtype=torch.int32, device=x.device) * len(x)


def rows_scale(scale: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """Return each row's factor, that of its expert, without reading the device.

    Args:
        scale: [E, 1, 1] FP32.
        offsets: [E + 1] int32; rows that belong to no expert take the last one's.
        num_rows: M.

    Returns:
        [M] FP32.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=offsets.device)
    # All of the boundaries: torch.compile reads a slice of them from its start.
    experts = torch.bucketize(rows, offsets, right=True).clamp_(max=len(scale)) - 1
    return scale.flatten()[experts]
