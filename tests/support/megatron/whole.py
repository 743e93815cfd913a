"""What ranks hold in parts, put together tensor by tensor."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# isort: split
from megatron.core import parallel_state

from qarl_kernels import QuantFormat, quantize_weight
from qarl_nemo.megatron.gather import gather_sharded, gather_stacked
from qarl_nemo.megatron.grouped_linear import AlignedGroupedLinear
from qarl_nemo.megatron.hf_parameters import layer_parameter, num_row_blocks


def _whole_experts(linear: nn.Module, shards: list[Tensor]) -> Tensor:
    dim, num_parts = (-2, 2) if "gate_up" in linear.aligned.name else (-1, 1)
    group = parallel_state.get_expert_tensor_parallel_group()
    local = gather_sharded(torch.stack(shards), group, dim, num_parts=num_parts)
    return gather_stacked(local, parallel_state.get_expert_model_parallel_group())


def whole_grads(model: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """This stage's gradients under Hugging Face's names; experts stacked."""
    group = parallel_state.get_tensor_model_parallel_group()
    for layer in (layer for chunk in model for layer in chunk.module.decoder.layers):
        for name, parameter in layer.named_parameters():
            if "mlp.experts" in name:
                continue
            grad = parameter.main_grad
            if getattr(parameter, "tensor_model_parallel", False):
                grad = gather_sharded(grad, group, parameter.partition_dim, num_parts=num_row_blocks(name))
            yield from layer_parameter(layer.layer_number - 1, name, grad, layer.config)
        experts = getattr(layer.mlp, "experts", None)
        for linear in (experts.linear_fc1, experts.linear_fc2) if experts else ():
            yield linear.aligned.name, _whole_experts(linear, [master.main_grad for master in linear.aligned.master])


def requantized(model: list[nn.Module], fmt: QuantFormat) -> Iterator[tuple[str, Tensor]]:
    """This stage's expert masters gathered, what publishing never does, and quantized again."""
    for module in (module for chunk in model for module in chunk.modules()):
        if isinstance(module, AlignedGroupedLinear):
            whole = _whole_experts(module, [master.detach() for master in module.aligned.master])
            for suffix, part in quantize_weight(whole, fmt).tensors.items():
                yield f"{module.aligned.name}.{suffix}", part
