"""Where every published tensor goes in one rank of a vLLM engine, found from the model that vLLM built.

vLLM fuses projections, stacks experts and keeps one shard of each. For every tensor that a learner publishes,
`engine_slots` says which parameter of which layer takes it, and which shape and dtype the whole tensor must have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.names import GLOBAL_SCALE
from qarl_nemo.refit.manifest import Layout

# Parameters that vLLM derives from the published tensors, or never reads; no learner publishes them.
_DERIVED = (
    "_shape", "_g_idx", "_g_idx_sort_indices", "_chan_scale", "input_global_scale", "input_scale", "_zero_point",
)  # fmt: skip
_EXPERT_PARTS = {"w13_": "gate_up_proj", "w2_": "down_proj"}
FUSED = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
_PER_CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one published tensor goes.

    Attributes:
        layer: vLLM's name of the layer that takes it.
        parameter: the layer's parameter, in the layout in which checkpoints are loaded.
        shard: vLLM's name for a part of a fused parameter; None for a whole one.
        shape: the published tensor's shape, not that of this rank's part.
        dtype: the published tensor's dtype.
    """

    layer: str
    parameter: str
    shard: str | int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def engine_slots(layers: Mapping[str, tuple[Any, Mapping[str, Tensor]]]) -> dict[str, Slot]:
    """Return the slot of every tensor that this rank takes.

    Args:
        layers: vLLM's layers by name, each with its parameters as checkpoints are loaded into them (of this rank).

    Returns:
        Published name -> slot.
    """
    slots: dict[str, Slot] = {}
    for name, (layer, parameters) in layers.items():
        for parameter, tensor in parameters.items():
            if not parameter.endswith(_DERIVED):
                slots.update(_slots(name, layer, parameter, tensor))
    return slots


def layout(slots: Mapping[str, Slot]) -> Layout:
    """Return name -> (shape, dtype) of every tensor that this rank takes."""
    return {name: (slot.shape, slot.dtype) for name, slot in slots.items()}


def plain_name(name: str) -> str:
    """Return a layer's name in vLLM without the wrapper that adds adapters to it."""
    return name.replace(".base_layer", "")


def is_experts(layer: Any) -> bool:
    """Say whether a vLLM layer holds routed experts."""
    return hasattr(layer, "expert_map_manager")


def expert_part(layer: Any, parameter: str, target: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a stacked expert tensor, in the layout in which checkpoints are loaded.

    Experts are sliced along dimension 0 (EP), gate and up separately along N, down along K (TP). vLLM's int4 layers
    hold the transpose.

    Args:
        layer: vLLM's layer of routed experts.
        parameter: `w13_...` or `w2_...`.
        target: the layer's parameter, whose shape the part takes.
        whole: [num_experts, N, ...], gate above up.

    Returns:
        [num_local_experts, ...], a view of `whole` if no copy is needed.
    """
    local = _local_experts(layer, whole)
    if parameter.endswith(GLOBAL_SCALE):
        return local.expand(-1, target.numel() // len(target)).reshape(target.shape)
    transposed = _is_transposed(target)
    gated = parameter.startswith("w13_")
    dimension = 1 if gated else 2
    size = target.shape[3 - dimension if transposed else dimension]
    if local.shape[dimension] != size:
        rank, halves = layer.moe_config.moe_parallel_config.tp_rank, 2 if gated else 1
        width = size // halves
        local = torch.cat(
            [half.narrow(dimension, rank * width, width) for half in local.chunk(halves, dimension)], dimension
        )
    return local.transpose(1, 2) if transposed else local


def _slots(name: str, layer: Any, parameter: str, tensor: Tensor) -> Iterator[tuple[str, Slot]]:
    if is_experts(layer):
        yield _expert_slot(name, layer, parameter, tensor)
        return
    parent, _, leaf = name.rpartition(".")
    shards = FUSED.get(leaf)
    if shards is None:
        yield f"{name}.{parameter}", Slot(name, parameter, None, _whole_shape(layer, tensor, None), tensor.dtype)
        return
    for index, shard in enumerate(shards):
        shape = (1,) if parameter == GLOBAL_SCALE else _whole_shape(layer, tensor, index)
        slot = Slot(name, parameter, shard if leaf == "qkv_proj" else index, shape, tensor.dtype)
        yield f"{parent}.{shard}_proj.{parameter}", slot


def _expert_slot(name: str, layer: Any, parameter: str, tensor: Tensor) -> tuple[str, Slot]:
    prefix = next(prefix for prefix in _EXPERT_PARTS if parameter.startswith(prefix))
    shape = [layer.global_num_experts, *tensor.shape[1:]]
    if _is_transposed(tensor):
        shape[1:] = reversed(shape[1:])
    tp_size = layer.moe_config.moe_parallel_config.tp_size
    if parameter.endswith(GLOBAL_SCALE):
        shape[1:] = [1]
    elif prefix == "w13_":
        shape[1] *= tp_size
    elif getattr(tensor, "quant_method", None) != _PER_CHANNEL:
        shape[2] *= tp_size
    block = name.removesuffix(".routed_experts")
    published = f"{block}.{_EXPERT_PARTS[prefix]}.{parameter.removeprefix(prefix)}"
    return published, Slot(name, parameter, None, tuple(shape), tensor.dtype)


def _whole_shape(layer: Any, tensor: Tensor, part: int | None) -> tuple[int, ...]:
    if hasattr(layer, "org_vocab_size"):
        return (layer.org_vocab_size, *tensor.shape[1:])
    shape = list(tensor.shape)
    rows, columns = getattr(tensor, "output_dim", None), getattr(tensor, "input_dim", None)
    if rows is not None and hasattr(layer, "output_size_per_partition"):
        shape[rows] = shape[rows] * output_size(layer, part) // layer.output_size_per_partition
    if columns is not None and hasattr(layer, "input_size_per_partition"):
        shape[columns] = shape[columns] * layer.input_size // layer.input_size_per_partition
    return tuple(shape)


def output_size(layer: Any, part: int | None) -> int:
    """Return N of a whole linear layer of vLLM, or of one part of a fused one, over all ranks."""
    if part is None:
        return layer.output_size
    if hasattr(layer, "total_num_kv_heads"):
        heads = layer.total_num_heads if part == 0 else layer.total_num_kv_heads
        return heads * (layer.v_head_size if part == 2 else layer.head_size)
    return layer.output_sizes[part]


def _is_transposed(parameter: Tensor) -> bool:
    return getattr(parameter, "is_transposed", False)


def _local_experts(layer: Any, whole: Tensor) -> Tensor:
    expert_map = layer.expert_map_manager.expert_map
    if expert_map is None:
        return whole
    owned = sorted((local, expert) for expert, local in enumerate(expert_map.tolist()) if local >= 0)
    experts = [expert for _, expert in owned]
    if experts == list(range(experts[0], experts[0] + len(experts))):
        return whole[experts[0] : experts[0] + len(experts)]
    return whole[torch.tensor(experts, device=whole.device)]
