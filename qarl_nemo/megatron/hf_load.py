"""Loads Hugging Face's parameters into this rank's part of a Megatron model, one at a time: undoes `publish`."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from qarl_nemo.megatron.hf_parameters import LAYER_NAMES, OUTER_NAMES

Take = Callable[[Tensor], None]


@torch.no_grad()
def load_parameters(model: GPTModel, named: Iterable[tuple[str, Tensor]]) -> None:
    """Fill this rank's parameters.

    Args:
        model: without wrappers.
        named: every parameter of the Hugging Face model, under the names that transformers has in memory: stacked
            experts [E, N, K].

    Raises:
        ValueError: parameters are missing or unknown; all are listed.
    """
    takers = dict(_takers(model))
    unknown = []
    for name, whole in named:
        take = takers.pop(name, None)
        if take is None:
            unknown.append(name)
        else:
            take(whole)
    if unknown or takers:
        raise ValueError(f"the Hugging Face model lacks {sorted(takers)} and has no Megatron name for {unknown}")


def _takers(model: GPTModel) -> Iterator[tuple[str, Take]]:
    for name, parameter in model.named_parameters():
        if name in OUTER_NAMES:
            yield OUTER_NAMES[name], _taker(parameter)
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        for name, parameter in layer.named_parameters():
            if name in LAYER_NAMES:
                yield prefix + LAYER_NAMES[name], _taker(parameter)
        yield from _attention_takers(prefix + "self_attn.", layer)
        experts, numbers = layer.mlp.experts, layer.mlp.local_expert_indices
        # Gate and up are split one by one, down along its columns.
        for name, linear, parts, dim in (("gate_up", experts.linear_fc1, 2, 0), ("down", experts.linear_fc2, 1, 1)):
            yield (
                f"{prefix}mlp.experts.{name}_proj",
                partial(_take_experts, linear.aligned.masters, numbers, parts, dim),
            )


def _taker(parameter: nn.Parameter) -> Take:
    def take(whole: Tensor) -> None:
        if not getattr(parameter, "tensor_model_parallel", False):
            parameter.copy_(whole)
            return
        size = parallel_state.get_tensor_model_parallel_world_size()
        # Rows beyond the vocabulary are padding.
        padding = parameter.shape[0] * size - len(whole) if parameter.partition_dim == 0 else 0
        whole = nn.functional.pad(whole, (0, 0, 0, padding))
        shards = whole.chunk(size, parameter.partition_dim)
        parameter.copy_(shards[parallel_state.get_tensor_model_parallel_rank()])

    return take


def _attention_takers(prefix: str, layer: TransformerLayer) -> Iterator[tuple[str, Take]]:
    config, rank = layer.config, parallel_state.get_tensor_model_parallel_rank()
    groups = config.num_query_groups // parallel_state.get_tensor_model_parallel_world_size()
    # Each KV head has its query heads, its key and its value in sequence.
    weight = layer.self_attention.linear_qkv.weight
    fused = weight.view(groups, -1, config.kv_channels, config.hidden_size)
    for letter, part in (("q", fused[:, :-2]), ("k", fused[:, -2:-1]), ("v", fused[:, -1:])):

        def take(whole: Tensor, part: Tensor = part) -> None:
            heads = whole.view(config.num_query_groups, -1, config.kv_channels, config.hidden_size)
            part.copy_(heads[rank * groups : (rank + 1) * groups])

        yield f"{prefix}{letter}_proj.weight", take


def _take_experts(own: list[nn.Parameter], numbers: list[int], num_parts: int, dim: int, whole: Tensor) -> None:
    group = parallel_state.get_expert_tensor_parallel_group()
    for parameter, number in zip(own, numbers, strict=True):
        parts = whole[number].chunk(num_parts)
        parameter.copy_(torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in parts]))
