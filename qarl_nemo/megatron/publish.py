"""The Megatron learner's side of a refit: gathers packed experts from their shards, layer by layer.

Every rank packs its own experts once, for its forward, and only the packed bytes are sent, never BF16 experts: over
expert-tensor-parallel ranks (gate and up rows separately, fc2 along its packed columns), over expert-parallel ranks
unless the receiver takes shards, and from the pipeline stage that holds a layer. All ranks run the same collectives and
see the same names in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from qarl_kernels import QuantFormat, QuantizedWeight
from qarl_nemo.layers.weight import AlignedWeight
from qarl_nemo.megatron.alignment import aligned_weights
from qarl_nemo.megatron.gather import broadcast_named, gather_sharded, gather_stacked
from qarl_nemo.megatron.hf_parameters import layer_parameter, num_row_blocks, outer_parameter, split_qkv
from qarl_nemo.megatron.moe_layer import AlignedMoELayer
from qarl_nemo.names import GLOBAL_SCALE
from qarl_nemo.refit.exchange import gather_plain, waiting_group
from qarl_nemo.refit.publish import Layer, StreamedUpdate, packed, require_servable

Named = tuple[str, Tensor]
_BEFORE_LAYERS, _AFTER_LAYERS = -1, 1 << 30
# What errors call a layer's linears: vLLM's names, which hold several of a checkpoint's in one. Experts have theirs.
_PUBLISHED = {
    "self_attention.linear_qkv": "self_attn.qkv_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc1": "mlp.gate_up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


def publish_layers(
    model: Sequence[nn.Module], *, vocab_size: int, fmt: QuantFormat | None = None, gather_experts: bool = True
) -> Iterator[Layer]:
    """Yield what the rollout engine will serve, in the names and layout of `refit.publish.publish_layers`.

    Besides this rank's packed experts, which its forward keeps, only one layer is held at a time: its dictionary is
    emptied when the next one is requested.

    Args:
        model: this rank's model chunks, wrapped or not; called on every rank.
        vocab_size: the Hugging Face model's vocabulary size; padding rows beyond it are cut off.
        fmt: the format of the aligned weights, None for the one they execute; weights in another format are made from
            the masters, shard by shard.
        gather_experts: yield all experts, [E, ...]; False yields only this rank's, [E_local, ...], from expert
            `ep_rank * E_local` on, to receivers that take shards.

    Yields:
        Tensors by name: those before the layers, each layer's, those after the layers. In groups of one rank they are
        the learner's own, so a receiver that keeps them must copy.

    Raises:
        ValueError: a weight on any rank holds NaN or Inf; all ranks raise and name every such weight.
    """
    _finish_parameters(model)
    _name_weights(model)
    _require_servable(model, fmt)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    parts = _parts(model, vocab_size, fmt, gather_experts)
    held = gather_plain(list(parts), pipeline)
    for part in sorted(set().union(*held)):
        owner = next(stage for stage, keys in enumerate(held) if part in keys)
        mine = list(parts[part]()) if owner == pipeline.rank() else None
        layer = dict(broadcast_named(mine, owner, pipeline))
        del mine
        yield layer
        layer.clear()


def publish_update(
    model: Sequence[nn.Module],
    fmt: QuantFormat,
    *,
    vocab_size: int,
    version: int,
    rehearsed: bool = False,
    lend: Callable[[Iterable[Layer]], Iterator[Layer]] = iter,
    watch: Callable[[Iterable[Layer]], Iterator[Layer]] = iter,
) -> StreamedUpdate:
    """Wrap the published layers in the update that `refit.push.push` takes; every rank holds one whole layer at a time.

    Args:
        model: see `publish_layers`; so is `vocab_size`.
        fmt: the rollout engine's format.
        vocab_size: the Hugging Face model's vocabulary size.
        version: the number by which engines will know these weights.
        rehearsed: see `StreamedUpdate`; so is `lend`.
        lend: what layers go through.
        watch: see `StreamedUpdate`.

    Returns:
        The update: every rank enters it, one pushes it.

    Raises:
        ValueError: see `publish_layers`.
    """
    stream = partial(publish_layers, model, vocab_size=vocab_size, fmt=fmt)
    return StreamedUpdate(stream, fmt, version=version, rehearsed=rehearsed, lend=lend, watch=watch)


def _finish_parameters(model: Sequence[nn.Module]) -> None:
    # With `overlap_param_gather` the next forward gathers updated parameters; publishing comes before it.
    for chunk in model:
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)


def _quantized(weight: AlignedWeight, fmt: QuantFormat | None) -> QuantizedWeight:
    return weight.quantized() if fmt is None else packed(weight, fmt)


def _name_weights(model: Sequence[nn.Module]) -> None:
    # Megatron does not tell a linear of which layer it is.
    for layer in _layers(model):
        for path, module in layer.named_modules():
            if path in _PUBLISHED and hasattr(module, "aligned"):
                module.aligned.name = f"model.layers.{layer.layer_number - 1}.{_PUBLISHED[path]}"


def _layers(model: Sequence[nn.Module]) -> Iterator[TransformerLayer]:
    return (module for chunk in model for module in chunk.modules() if isinstance(module, TransformerLayer))


def _require_servable(model: Sequence[nn.Module], fmt: QuantFormat | None) -> None:
    problem, weights = None, aligned_weights(model)
    masters = {id(master) for weight in weights for master in weight.masters}
    plain = {
        name: parameter.detach()
        for chunk in model
        for name, parameter in _unwrapped(chunk).named_parameters()
        if id(parameter) not in masters
    }
    try:
        # Only the counts are kept: tensors in another format than the forward's are made again, layer by layer.
        require_servable({one.name: replace(_quantized(one, fmt), tensors={}) for one in weights}, plain)
    except ValueError as error:
        problem = str(error)
    # If one rank raised by itself, the others would wait for it in a collective.
    problems = gather_plain(problem, waiting_group())
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise ValueError("nothing was published:\n  " + "\n  ".join(found))


def _parts(
    model: Sequence[nn.Module], vocab_size: int, fmt: QuantFormat | None, gather_experts: bool
) -> dict[int, Callable[[], Iterator[Named]]]:
    parts: dict[int, Callable[[], Iterator[Named]]] = {}
    for chunk in model:
        for layer in _layers([chunk]):
            parts[layer.layer_number - 1] = lambda layer=layer: _layer(layer, fmt, gather_experts)
        outer = dict(_outer(chunk))
        for part, names in ((_BEFORE_LAYERS, ("embedding.",)), (_AFTER_LAYERS, ("decoder.", "output_layer."))):
            mine = {name: parameter for name, parameter in outer.items() if name.startswith(names)}
            if mine:
                parts[part] = lambda mine=mine: (
                    outer_parameter(name, _whole(name, parameter), vocab_size) for name, parameter in mine.items()
                )
    return parts


def _outer(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in _unwrapped(chunk).named_parameters():
        tied_copy = getattr(parameter, "shared_embedding", False) and name.startswith("output_layer.")
        if ".layers." not in name and not tied_copy:
            yield name, parameter


def _unwrapped(chunk: nn.Module) -> nn.Module:
    # DDP and Float16Module both keep what they wrap as `module`.
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    return chunk


def _layer(layer: TransformerLayer, fmt: QuantFormat | None, gather_experts: bool) -> Iterator[Named]:
    number = layer.layer_number - 1
    quantized = {id(master) for weight in aligned_weights([layer]) for master in weight.masters}
    for name, parameter in layer.named_parameters():
        if id(parameter) not in quantized:
            yield from layer_parameter(number, name, _whole(name, parameter), layer.config)
    attention = layer.self_attention
    if hasattr(attention.linear_qkv, "aligned"):
        yield from _attention(number, attention, layer.config, fmt)
    if hasattr(getattr(layer.mlp, "linear_fc1", None), "aligned"):
        yield from _mlp(number, layer.mlp, fmt)
    if isinstance(layer.mlp, AlignedMoELayer):
        fc1, fc2 = (linear.aligned for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2))
        yield from _experts(fc1.name, _quantized(fc1, fmt), -2, 2, gather_experts)
        yield from _experts(fc2.name, _quantized(fc2, fmt), -1, 1, gather_experts)


def _attention(number: int, attention: nn.Module, config: Any, fmt: QuantFormat | None) -> Iterator[Named]:
    group = parallel_state.get_tensor_model_parallel_group()
    prefix = f"model.layers.{number}.self_attn."
    for suffix, shard in _quantized(attention.linear_qkv.aligned, fmt).tensors.items():
        whole = gather_sharded(shard, group, 0)
        parts = [whole] * 3 if suffix == GLOBAL_SCALE else split_qkv(whole, config)
        for letter, part in zip("qkv", parts, strict=True):
            yield f"{prefix}{letter}_proj.{suffix}", part
    for suffix, shard in _quantized(attention.linear_proj.aligned, fmt).tensors.items():
        yield f"{prefix}o_proj.{suffix}", gather_sharded(shard, group, 1)


def _mlp(number: int, mlp: nn.Module, fmt: QuantFormat | None) -> Iterator[Named]:
    group = parallel_state.get_tensor_model_parallel_group()
    prefix = f"model.layers.{number}.mlp."
    for suffix, shard in _quantized(mlp.linear_fc1.aligned, fmt).tensors.items():
        whole = gather_sharded(shard, group, 0, num_parts=2)
        parts = [whole] * 2 if suffix == GLOBAL_SCALE else whole.chunk(2)
        for projection, part in zip(("gate", "up"), parts, strict=True):
            yield f"{prefix}{projection}_proj.{suffix}", part
    for suffix, shard in _quantized(mlp.linear_fc2.aligned, fmt).tensors.items():
        yield f"{prefix}down_proj.{suffix}", gather_sharded(shard, group, 1)


def _whole(name: str, parameter: nn.Parameter) -> Tensor:
    tensor = parameter.detach()
    if not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    group = parallel_state.get_tensor_model_parallel_group()
    return gather_sharded(tensor, group, parameter.partition_dim, num_parts=num_row_blocks(name))


def _experts(name: str, quantized: QuantizedWeight, dim: int, num_parts: int, gather_experts: bool) -> Iterator[Named]:
    tensor_group = parallel_state.get_expert_tensor_parallel_group()
    expert_group = parallel_state.get_expert_model_parallel_group()
    for suffix, shard in quantized.tensors.items():
        local = gather_sharded(shard, tensor_group, dim, num_parts=num_parts)
        yield f"{name}.{suffix}", gather_stacked(local, expert_group) if gather_experts else local
