"""Megatron layer specs with aligned experts: what to pass to `GPTModel`, or to Bridge's `transformer_layer_spec`."""

import copy
import dataclasses
import functools
from typing import Any

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from qarl_nemo.nemo.alignment import Alignment
from qarl_nemo.nemo.checks import require_supported
from qarl_nemo.nemo.grouped_linear import (
    AlignedLocalColumnGroupedLinear,
    AlignedLocalRowGroupedLinear,
    transformer_engine_grouped_linears,
)
from qarl_nemo.nemo.moe_layer import AlignedGroupedMLP, AlignedMoELayer
from qarl_nemo.nemo.router import AlignedTopKRouter


class _AlignedExperts:
    def __init__(self, alignment: Alignment) -> None:
        super().__init__()
        self.alignment = alignment

    def grouped_linears(self) -> tuple[type, type]:
        """Return fc1's and fc2's class."""
        raise NotImplementedError

    def grouped_mlp_modules(self, *_: Any) -> Any:
        """Return the expert MLP: a builder (Megatron-core 0.20), or class and submodules (0.16)."""
        linears = self.grouped_linears()
        if hasattr(megatron_experts, "GroupedMLPSubmodules"):
            fc1, fc2 = (functools.partial(linear, alignment=self.alignment) for linear in linears)
            submodules = megatron_experts.GroupedMLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)
            return functools.partial(AlignedGroupedMLP, submodules=submodules)
        fc1, fc2 = (ModuleSpec(linear, {"alignment": self.alignment}) for linear in linears)
        return AlignedGroupedMLP, MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)


class AlignedTESpecProvider(_AlignedExperts, TESpecProvider):
    """Megatron's Transformer-Engine backend with aligned experts."""

    def grouped_linears(self) -> tuple[type, type]:
        """Return fc1's and fc2's class."""
        return transformer_engine_grouped_linears()


class AlignedLocalSpecProvider(_AlignedExperts, LocalSpecProvider):
    """Megatron's local backend with aligned experts."""

    def grouped_linears(self) -> tuple[type, type]:
        """Return fc1's and fc2's class."""
        return AlignedLocalColumnGroupedLinear, AlignedLocalRowGroupedLinear


def align_spec(spec: Any, config: Any, alignment: Alignment, *, transformer_engine: bool) -> Any:
    """Replace the MoE layers of a GPT layer or block spec by aligned ones.

    Args:
        spec: of Megatron's `get_gpt_layer_with_transformer_engine_spec`, `get_gpt_layer_local_spec` or
            `get_gpt_decoder_block_spec`; stays as it is.
        config: the `TransformerConfig` that the model will be built with.
        alignment: what the model executes.
        transformer_engine: whether the experts' parameters are Transformer-Engine's.

    Returns:
        The aligned spec.

    Raises:
        ValueError: a setting under which the forward would not be the engine's, or that is not supported, all listed;
            or the spec holds no MoE layer.
    """
    require_supported(config, alignment)
    aligned = copy.deepcopy(spec)
    layers = aligned.layer_specs if hasattr(aligned, "layer_specs") else [aligned]
    moe = [layer for layer in layers if _is_moe(layer.submodules.mlp)]
    if not moe:
        raise ValueError("the spec holds no MoE layer: targets ['experts'] match nothing, nothing would be quantized")
    provider = (AlignedTESpecProvider if transformer_engine else AlignedLocalSpecProvider)(alignment)
    for layer in moe:
        layer.submodules.mlp = _aligned_moe(provider, config.num_moe_experts)
    return aligned


def _is_moe(mlp: Any) -> bool:
    return getattr(mlp, "func", getattr(mlp, "module", None)) is MoELayer


def _aligned_moe(provider: _AlignedExperts, num_experts: int) -> Any:
    spec = get_moe_module_spec_for_backend(provider, num_experts=num_experts, moe_grouped_gemm=True)
    if isinstance(spec, ModuleSpec):
        submodules = dataclasses.replace(spec.submodules, router=AlignedTopKRouter)
        return ModuleSpec(
            AlignedMoELayer, {"alignment": provider.alignment}, submodules=submodules, metainfo=spec.metainfo
        )
    submodules = dataclasses.replace(spec.keywords["submodules"], router=AlignedTopKRouter)
    return functools.partial(AlignedMoELayer, submodules=submodules, alignment=provider.alignment)
