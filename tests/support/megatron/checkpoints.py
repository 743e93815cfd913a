"""Compares an aligned model's distributed checkpoint with that of Megatron's own model."""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.megatron.models import (
    DEVICE,
    TINY,
    Layout,
    gpt_model,
    megatron_model,
    parallel,
    plain_spec,
    transformer_config,
)

# isort: split
from megatron.core import dist_checkpointing

from qarl_nemo.megatron.alignment import Alignment
from support.megatron.compare import published

Described = set[tuple[Any, ...]]


def _described(sharded: dict[str, Any]) -> Described:
    """Return, for each shard, its key on disk, the whole tensor's shape, and the shard's place in it."""
    shards = set()
    for shard in sharded.values():
        # Fused gate and up are split where they are saved.
        for part in _leaves(shard.build()) if hasattr(shard, "build_fn") else [shard]:
            shards.add((part.key, tuple(part.global_shape), tuple(part.global_offset), tuple(part.replica_id)))
    return shards


def _leaves(built: Any) -> list[Any]:
    if isinstance(built, dict | list | tuple):
        return [leaf for part in (built.values() if isinstance(built, dict) else built) for leaf in _leaves(part)]
    return [built]


def checkpoint_keys(layout: Layout, alignment: Alignment) -> tuple[Described, Described]:
    """This rank's shards of the aligned model, and of Megatron's own model."""
    with parallel(layout):
        plain = gpt_model(transformer_config(layout, torch.float32), plain_spec())
        aligned = megatron_model(layout, alignment)
        aligned.load_state_dict(aligned.state_dict())
        assert alignment.changes.count > 0
        return _described(aligned.sharded_state_dict()), _described(plain.sharded_state_dict())


def reloaded(saved: Layout, loaded: Layout, alignment: Alignment) -> dict[str, Tensor]:
    """What a model publishes after one layout saved it and another loaded it."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=DEVICE)
    with parallel(saved):
        dist_checkpointing.save(megatron_model(saved, alignment).sharded_state_dict(), folder[0])
    with parallel(loaded):
        model = megatron_model(loaded, alignment)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder[0]))
        tensors = {name: tensor.clone() for name, tensor in published([model], vocab_size=TINY.vocab)}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return tensors
