"""Put new weights into a vLLM layer through vLLM's own conversion, without moving what captured CUDA graphs read.

Conversion (`process_weights_after_loading`) replaces parameters and rebuilds kernels, workspaces and strides, but a
CUDA graph has captured their addresses. So it runs on a copy of the layer, and the results are copied into the live
tensors.

Source: vLLM 0.25.1, `model_executor/model_loader/reload`, which restores, converts and copies back in the layer itself.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qarl_nemo.names import GLOBAL_SCALE, expert_names
from qarl_nemo.refit.convert_int4 import quick_conversion
from qarl_nemo.refit.convert_nvfp4 import PLAIN_TENSORS, nvfp4_conversion
from qarl_nemo.refit.engine_layout import Slot, is_experts
from qarl_nemo.refit.manifest import bytes_of

_OWNERS = ("quant_method", "scheme")
_KERNELS = ("kernel", "fp8_linear", "w8a8_block_fp8_linear")
_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_PACKED = "weight_packed"


def checkpoint_tensors(layers: Iterable[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield published tensors as a quantized checkpoint holds them: one expert and one projection each.

    Args:
        layers: tensors by published name.

    Yields:
        Checkpoint name and tensor (a view), and `weight_shape` beside every weight packed in int32 words.
    """
    for layer in layers:
        for name, tensor in layer.items():
            for single, part in _single_weights(name, tensor):
                yield single, part
                owner, _, suffix = single.rpartition(".")
                if suffix == _PACKED and part.dtype == torch.int32:
                    # 8 codes of 4 bits per word: CPU engines, the only ones loaded like this, serve no other width.
                    yield f"{owner}.weight_shape", torch.tensor([part.shape[0], part.shape[1] * 8])


def _single_weights(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not name.rpartition(".")[0].endswith(_STACKED):
        yield name, tensor
        return
    for parts, expert in zip(expert_names(name, len(tensor)), tensor, strict=True):
        # Gate and up of an expert have one global scale.
        same = name.endswith(GLOBAL_SCALE)
        yield from zip(parts, [expert] * len(parts) if same else expert.chunk(len(parts)), strict=True)


def checkpoint_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Return a layer's parameters as checkpoints are loaded into them, on the meta device.

    Args:
        layer: a layer of a model that vLLM built.

    Returns:
        Name -> meta tensor, with the attributes that vLLM's loaders read; without the parameters of submodules.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters = dict(get_layerwise_info(layer).restore_metadata[0])
    bias = layer._parameters.get("bias")
    if parameters and bias is not None and "bias" not in parameters:
        # vLLM 0.27 loads biases anew as well, but does not list them, since they keep their place and shape.
        meta: Any = bias.data.to("meta")
        meta.__class__, meta.__dict__ = bias.__class__, dict(bias.__dict__)
        parameters["bias"] = meta
    return parameters


def is_converted(layer: nn.Module) -> bool:
    """Say whether the layer's kernels read other tensors than the ones checkpoints are loaded into."""
    method = getattr(layer, "quant_method", None)
    # Even BF16 experts may be shuffled for their kernel.
    return method is not None and (is_experts(layer) or not type(method).__name__.startswith("Unquantized"))


def load_parts(layer: nn.Module, parts: Iterable[tuple[Slot, Tensor]]) -> None:
    """Load published tensors into a layer that holds its parameters as checkpoints are loaded into them.

    Args:
        layer: the layer.
        parts: published tensors: this rank's part of experts, and all others whole, which vLLM's loaders slice.
    """
    for slot, tensor in parts:
        parameter = getattr(layer, slot.parameter)
        loader = None if is_experts(layer) else getattr(parameter, "weight_loader", None)
        if loader is None:
            parameter.data.copy_(tensor)
        else:
            loader(parameter, tensor, *(() if slot.shard is None else (slot.shard,)))


def convert(
    layer: nn.Module, parts: Iterable[tuple[Slot, Tensor]], device: torch.device, *, check: bool
) -> dict[str, Tensor]:
    """Return the kernel tensors of a quantized layer with new weights.

    Args:
        layer: a live layer of vLLM's model; neither it nor its kernels change.
        parts: this rank's part of every published tensor of the layer.
        device: the engine rank's device.
        check: compare a conversion of ours with vLLM's own.

    Returns:
        Name -> tensor, for all tensors of the layer that depend on the weights.

    Raises:
        RuntimeError: the two conversions differ.
    """
    scratch = _blank_copy(layer, device)
    load_parts(scratch, parts)
    quick = quick_conversion(layer) or nvfp4_conversion(layer)
    if quick is None:
        return _convert_as_vllm_does(scratch)
    tensors = with_bias(quick(scratch), scratch)
    if check:
        expected = _convert_as_vllm_does(scratch)
        differing = [name for name, tensor in tensors.items() if not _same_bytes(tensor, expected[name])]
        if differing:
            raise RuntimeError(f"converted otherwise than vLLM {type(layer.quant_method).__name__} does: {differing}")
    return tensors


def with_bias(tensors: Mapping[str, Tensor], layer: nn.Module) -> dict[str, Tensor]:
    """Return the kernel tensors of a weight and, if the layer has one, its bias, which kernels read as it is loaded."""
    bias = layer._parameters.get("bias")
    return dict(tensors) if bias is None else {**tensors, "bias": bias.data}


def overwrite(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy converted tensors into the live ones, whose addresses stay.

    Args:
        layer: the live layer.
        tensors: what `convert` returned.

    Raises:
        RuntimeError: the live layer holds other tensors; nothing is copied.
    """
    live = _tensors(layer)
    wrong = [
        f"{name} {_describe(live[name]) if name in live else 'missing'} became {_describe(tensor)}"
        for name, tensor in tensors.items()
        if name not in live or _describe(live[name]) != _describe(tensor)
    ]
    if wrong:
        raise RuntimeError("conversion gave other tensors than the engine's kernels read: " + "; ".join(wrong))
    for name, tensor in tensors.items():
        live[name].data.copy_(tensor)


def _convert_as_vllm_does(scratch: nn.Module) -> dict[str, Tensor]:
    shared = {id(buffer) for buffer in scratch._buffers.values()}
    method: Any = scratch.quant_method
    method.process_weights_after_loading(scratch)
    return {name: tensor.data for name, tensor in _tensors(scratch).items() if id(tensor) not in shared}


def _blank_copy(layer: nn.Module, device: torch.device) -> nn.Module:
    scratch = copy.copy(layer)
    # copy.copy shares a module's dictionaries with the original, so copy them, too.
    for name in ("_parameters", "_buffers", "_modules"):
        scratch.__dict__[name] = dict(layer.__dict__[name])
    scratch._parameters.clear()
    for name, meta in checkpoint_parameters(layer).items():
        scratch.register_parameter(name, _materialize(name, meta, layer, device))
    for owner in _OWNERS:
        if hasattr(layer, owner):
            setattr(scratch, owner, _detached(getattr(layer, owner)))
    return scratch


def _materialize(name: str, meta: Tensor, layer: nn.Module, device: torch.device) -> nn.Parameter:
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    tensor = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)
    live = layer._parameters.get(name)
    if live is not None and _describe(live) == _describe(tensor):
        # Values that no update brings (shapes, scales yet to be derived) stay as the engine loaded them.
        tensor.copy_(live.data)
    tensor.__class__, tensor.__dict__ = meta.__class__, dict(meta.__dict__)
    # Bind loaders to the live layer; bound to the copy, they would keep it in memory until a garbage collection.
    return restore_layer_refs(tensor, layer)


def _detached(method: Any) -> Any:
    method = copy.copy(method)
    for name in _KERNELS:
        if hasattr(method, name):
            setattr(method, name, copy.copy(getattr(method, name)))
    return method


def _tensors(layer: nn.Module) -> Mapping[str, Tensor]:
    own = layer._parameters | layer._buffers | {name: vars(layer).get(name) for name in PLAIN_TENSORS}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return _describe(one) == _describe(other) and torch.equal(bytes_of(one), bytes_of(other))


def _describe(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)
