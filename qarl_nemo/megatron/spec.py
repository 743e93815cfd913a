"""Aligned layer specs for Megatron, to pass to `GPTModel` or to Bridge's `transformer_layer_spec`."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.attention_linear import (
    AlignedColumnParallelLinear,
    AlignedRowParallelLinear,
    SeparateTENorm,
    transformer_engine_linears,
)
from qarl_nemo.megatron.checks import require_supported
from qarl_nemo.megatron.dense_mlp import AlignedMLP
from qarl_nemo.megatron.engine_rounding import block_spec, follow_engine
from qarl_nemo.megatron.grouped_linear import (
    AlignedLocalColumnGroupedLinear,
    AlignedLocalRowGroupedLinear,
    transformer_engine_grouped_linears,
)
from qarl_nemo.megatron.moe_layer import AlignedGroupedMLP, AlignedMoELayer
from qarl_nemo.megatron.router import AlignedTopKRouter


class _AlignedExperts:
    # The classes of the experts' fc1 and fc2.
    grouped_linears: Callable[[], tuple[type, type]]
    # The class of linear_qkv and a dense linear_fc1, and of linear_proj and a dense linear_fc2.
    linears: Callable[[], tuple[type, type]]

    def __init__(self, alignment: Alignment) -> None:
        super().__init__()
        self.alignment = alignment

    def grouped_mlp_modules(self, *_: Any) -> Any:
        """Return the expert MLP: a builder (Megatron-core 0.20), or class and submodules (0.16)."""
        fc1, fc2 = (ModuleSpec(linear, {"alignment": self.alignment}) for linear in self.grouped_linears())
        if hasattr(megatron_experts, "GroupedMLPSubmodules"):
            return ModuleSpec(
                AlignedGroupedMLP, submodules=megatron_experts.GroupedMLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)
            )
        return AlignedGroupedMLP, MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)


class AlignedTESpecProvider(_AlignedExperts, TESpecProvider):
    """Megatron's Transformer-Engine backend with aligned experts."""

    grouped_linears = staticmethod(transformer_engine_grouped_linears)
    linears = staticmethod(transformer_engine_linears)


class AlignedLocalSpecProvider(_AlignedExperts, LocalSpecProvider):
    """Megatron's local backend with aligned experts."""

    grouped_linears = staticmethod(lambda: (AlignedLocalColumnGroupedLinear, AlignedLocalRowGroupedLinear))
    linears = staticmethod(lambda: (AlignedColumnParallelLinear, AlignedRowParallelLinear))


def align_spec(
    spec: Any, config: Any, alignment: Alignment, *, transformer_engine: bool, vp_stage: int | None = None
) -> Any:
    """Replace the targeted experts, attention linears and dense MLPs of a GPT layer or block spec by aligned ones.

    With `alignment.engine_rounding` norms and rotary embedding get the engine's rounding points.

    Args:
        spec: what Megatron's `get_gpt_layer_with_transformer_engine_spec`, `get_gpt_layer_local_spec` or
            `get_gpt_decoder_block_spec` returned; it is not changed.
        config: the `TransformerConfig` that the model will be built with.
        alignment: what the model executes.
        transformer_engine: whether the linears' parameters are Transformer-Engine's.
        vp_stage: which virtual pipeline stage a layer spec is for, if stages differ in their number of layers.

    Returns:
        The aligned spec: with engine rounding this pipeline stage's block, else the same kind of spec as `spec`.

    Raises:
        ValueError: settings that are not supported or under which the forward would not be the engine's, all listed;
            the backend needs Transformer-Engine's layers; or a target matches nothing.
    """
    require_supported(config, alignment)
    if alignment.backend == "transformer_engine" and not transformer_engine:
        raise ValueError("backend='transformer_engine' multiplies in Transformer-Engine's layers: build from its spec")
    aligned = copy.deepcopy(spec)
    layers = aligned.layer_specs if hasattr(aligned, "layer_specs") else [aligned]
    # Megatron's block specs hold one spec for all layers of a kind.
    layers = list({id(layer): layer for layer in layers}.values())
    moe = [layer for layer in layers if _module(layer.submodules.mlp) is MoELayer]
    dense = [layer for layer in layers if _module(layer.submodules.mlp) is MLP]
    _require_matches(alignment.targets, moe, dense)
    provider = (AlignedTESpecProvider if transformer_engine else AlignedLocalSpecProvider)(alignment)
    for layer in moe:
        layer.submodules.mlp = _aligned_moe(provider, config.num_moe_experts)
    for layer in layers if alignment.engine_rounding or "attention" in alignment.targets else []:
        _separate_input_norm(layer, provider)
    for layer in dense if alignment.engine_rounding or "mlp" in alignment.targets else []:
        _separate_mlp_norm(layer, provider)
    for layer in layers if "attention" in alignment.targets else []:
        _align_attention(layer, provider)
    for layer in dense if "mlp" in alignment.targets else []:
        _align_mlp(layer, provider)
    if not alignment.engine_rounding:
        return aligned
    for layer in layers:
        follow_engine(layer)
    return block_spec(aligned, config, vp_stage)


def _module(mlp: Any) -> Any:
    # In Megatron-core 0.20 this is a builder, for a dense MLP one of its class's methods; in 0.16 it is a ModuleSpec.
    built = getattr(mlp, "func", getattr(mlp, "module", None))
    return getattr(built, "__self__", built)


def _submodules(mlp: Any) -> Any:
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


def _require_matches(targets: tuple[str, ...], moe: list[Any], dense: list[Any]) -> None:
    problems = []
    if "experts" in targets and not moe:
        problems.append("the spec holds no MoE layer: target 'experts' matches nothing; dense models have 'mlp'")
    if "mlp" in targets and not dense:
        problems.append("the spec holds no dense MLP: target 'mlp' matches nothing; MoE models have 'experts'")
    if moe and "experts" not in targets:
        problems.append(f"targets={list(targets)}: the spec holds MoE layers, whose experts must be among them")
    if problems:
        raise ValueError("; ".join(problems))


def _aligned_moe(provider: _AlignedExperts, num_experts: int) -> Any:
    spec = get_moe_module_spec_for_backend(provider, num_experts=num_experts, moe_grouped_gemm=True)
    submodules = dataclasses.replace(_submodules(spec), router=AlignedTopKRouter)
    return ModuleSpec(AlignedMoELayer, {"alignment": provider.alignment}, submodules=submodules)


def _separate_norm(layer: Any, name: str, fused: str) -> None:
    setattr(layer.submodules, name, SeparateTENorm)
    # Checkpoints keep the fused norm's key.
    keys = layer.submodules.sharded_state_dict_keys_map | {f"{name}.": fused}
    layer.submodules.sharded_state_dict_keys_map = keys


def _separate_input_norm(layer: Any, provider: _AlignedExperts) -> None:
    attention = layer.submodules.self_attention.submodules
    if attention.linear_qkv is provider.column_parallel_layer_norm_linear():
        _separate_norm(layer, "input_layernorm", "self_attention.linear_qkv.layer_norm_")
        attention.linear_qkv = provider.column_parallel_linear()


def _separate_mlp_norm(layer: Any, provider: _AlignedExperts) -> None:
    submodules = _submodules(layer.submodules.mlp)
    if submodules.linear_fc1 is provider.column_parallel_layer_norm_linear():
        _separate_norm(layer, "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_")
        _set_mlp(layer, MLP, linear_fc1=provider.column_parallel_linear())


def _align_attention(layer: Any, provider: _AlignedExperts) -> None:
    attention = layer.submodules.self_attention.submodules
    column, row = provider.linears()
    attention.linear_qkv = ModuleSpec(column, {"alignment": provider.alignment})
    attention.linear_proj = ModuleSpec(row, {"alignment": provider.alignment})


def _align_mlp(layer: Any, provider: _AlignedExperts) -> None:
    fc1, fc2 = (ModuleSpec(linear, {"alignment": provider.alignment}) for linear in provider.linears())
    _set_mlp(layer, AlignedMLP, linear_fc1=fc1, linear_fc2=fc2)


def _set_mlp(layer: Any, mlp_class: type[MLP], **linears: Any) -> None:
    mlp = layer.submodules.mlp
    submodules = dataclasses.replace(_submodules(mlp), **linears)
    if isinstance(mlp, ModuleSpec):
        layer.submodules.mlp = ModuleSpec(mlp_class, submodules=submodules)
    else:
        layer.submodules.mlp = functools.partial(mlp_class.as_mlp_submodule, submodules=submodules)
