"""Shards of a tensor put together over a process group, as raw bytes: every dtype travels, FP8 and int32 included."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_stacked(tensor: Tensor, group: Any) -> Tensor:
    """Return every rank's tensor, one after another along the first dimension.

    Args:
        tensor: of one shape on all ranks.
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
        num_parts: how many tensors lie one after another along `dim`, each split by itself: 2 for gate and up.

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
    layout = [None if named is None else [(name, tensor.shape, tensor.dtype) for name, tensor in named]]
    dist.broadcast_object_list(layout, src=source, group=group, device=device)
    if named is None:
        named = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in layout[0]]
    for _, tensor in named:
        # The owner's may be a view; what is sent is its values.
        wire = tensor.contiguous()
        dist.broadcast(wire.view(torch.uint8), src=source, group=group)
    return named
