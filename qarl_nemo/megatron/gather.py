"""Gathers the shards of tensors over a process group, as raw bytes, so that FP8 works like any other dtype."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qarl_nemo.refit.exchange import broadcast_plain
from qarl_nemo.refit.manifest import dtype_name


def gather_stacked(tensor: Tensor, group: Any) -> Tensor:
    """Return every rank's tensor, one after another along the first dimension.

    Args:
        tensor: the same shape on all ranks.
        group: the process group.

    Returns:
        [ranks * first dimension, ...]; the tensor itself in a group of one.
    """
    if group.size() == 1:
        return tensor
    tensor = tensor.contiguous()
    whole = torch.empty(group.size() * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(whole.view(torch.uint8), tensor.view(torch.uint8), group=group)
    return whole


def gather_sharded(tensor: Tensor, group: Any, dim: int, *, num_parts: int = 1) -> Tensor:
    """Return the tensor whose shards the ranks hold.

    Args:
        tensor: this rank's shard, of one shape on all ranks.
        group: the process group.
        dim: the dimension that is split.
        num_parts: how many tensors follow one another along `dim`, each split by itself: 2 for gate and up.

    Returns:
        The whole tensor; the shard itself in a group of one.
    """
    if group.size() == 1:
        return tensor
    shards = gather_stacked(tensor.unsqueeze(0), group).unbind(0)
    parts = [shard.chunk(num_parts, dim) for shard in shards]
    return torch.cat([shard[part] for part in range(num_parts) for shard in parts], dim)


def broadcast_named(named: list[tuple[str, Tensor]] | None, owner: int, group: Any) -> list[tuple[str, Tensor]]:
    """Return the named tensors of one rank on every rank.

    Args:
        named: what the owner holds; None elsewhere.
        owner: its rank in the group.
        group: the process group.

    Returns:
        The owner's own tensors on the owner, copies elsewhere.
    """
    if group.size() == 1:
        assert named is not None
        return named
    source = dist.get_global_rank(group, owner)
    on_host = dist.get_backend(group) == "gloo"
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    layout = broadcast_plain(layout_of(named), group, source=owner)
    if named is None:
        named = [(name, empty(*record, device)) for name, *record in layout]
    for _, tensor in named:
        # The owner's tensor may be a view, which cannot be sent as bytes.
        wire = tensor.contiguous()
        dist.broadcast(wire.view(torch.uint8), src=source, group=group)
    return named


def layout_of(named: list[tuple[str, Tensor]] | None) -> list[tuple[str, list[int], str]] | None:
    """Describe tensors as plain data; None stays None."""
    return None if named is None else [(name, list(one.shape), dtype_name(one.dtype)) for name, one in named]


def empty(shape: list[int], dtype: str, device: torch.device) -> Tensor:
    """Return a tensor that `layout_of` described, not filled."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
