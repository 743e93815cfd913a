"""Megatron's norms and rotary embedding with the rollout engine's rounding points.

Megatron's own builders make the modules, so parameters, their attributes and checkpoints stay as they are; only the
forward is replaced. Residual additions stay Megatron's, which rounds the sum of two BF16 tensors once, too.
"""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from qarl_nemo.layers.engine_rounding import normalize, rotate

_TAKES_LENGTH = "max_seqlen" in inspect.signature(apply_rotary_pos_emb).parameters
# The settings that Megatron's rotation in torch reads from a config.
_IN_TORCH = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)


class _Normalizing:
    after_add: bool
    engine_eps: float
    noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension: [..., H] -> [..., H] in x's dtype."""
        return normalize(x, self.weight, self.engine_eps, after_add=self.after_add, noise=self.noise)


class EngineNorm:
    """Megatron's norm with the engine's forward.

    Args:
        own: builds Megatron's norm.
        after_add: the engine adds the residual in the same kernel.
        config: Megatron's `TransformerConfig`.
        hidden_size: H.
        eps: added to the mean square.
    """

    def __new__(cls, *, own: Any, after_add: bool, config: Any, hidden_size: int, eps: float) -> Any:
        """Return the norm itself."""
        build = own if callable(own) else functools.partial(build_module, own)
        norm = build(config=config, hidden_size=hidden_size, eps=eps)
        norm.__class__ = _subclass(_Normalizing, type(norm))
        norm.after_add, norm.engine_eps = after_add, eps
        return norm


class Rotating:
    """Self-attention that rotates queries and keys in FP32 by the engine's BF16 cosines and sines, and rounds once."""

    _angles: Tensor | None = None
    _packed: Any = None

    def forward(
        self, *arguments: Any, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as Megatron's self-attention does.

        Args:
            arguments: positional arguments of Megatron's forward.
            rotary_pos_emb: angles [S, 1, 1, D], or a pair of them, for queries and for keys.
            packed_seq_params: Megatron's, for packed sequences.
            named: keyword arguments of Megatron's forward.

        Returns:
            What linear_proj returns.

        Raises:
            ValueError: there are no angles, or they are for a part of a head, or for Megatron's inference.
        """
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        width = self.hidden_size_per_attention_head
        if angles is None or angles.shape[-1] != width or named.get("inference_context") is not None:
            raise ValueError(
                f"engine rounding rotates whole heads of {width} in training: it got angles "
                f"{None if angles is None else list(angles.shape)} and inference_context="
                f"{named.get('inference_context')}; build the model with Alignment(engine_rounding=False)"
            )
        self._angles, self._packed = angles, packed_seq_params
        try:
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **named)
        finally:
            self._angles = self._packed = None

    def get_query_key_value_tensors(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        """Project, normalize and rotate: Megatron's result with rotated query and key [S, B, heads, D]."""
        query, key, *rest = super().get_query_key_value_tensors(*arguments, **named)
        cos, sin = self._cos_and_sin(query)
        return rotate(query, cos, sin), rotate(key, cos, sin), *rest

    def _cos_and_sin(self, query: Tensor) -> tuple[Tensor, ...]:
        # Rotating the pair (1, 0) with Megatron's own function yields each token's (cos, sin), so sequence packing and
        # context parallelism need no code here.
        packed = self._packed is not None and self._packed.qkv_format == "thd"
        rows, width = query.shape[0], query.shape[-1]
        pairs = torch.zeros(rows, 1, width, device=query.device)
        pairs[..., : width // 2] = 1
        turned = apply_rotary_pos_emb(
            pairs if packed else pairs.unsqueeze(2),
            self._angles,
            config=_IN_TORCH,
            cp_group=self.pg_collection.cp,
            **(self._sequences() if packed else {}),
        )
        halves = turned.view(rows, 1, width).to(query.dtype).chunk(2, dim=-1)
        return tuple(torch.cat([half, half], dim=-1) for half in halves)

    def _sequences(self) -> dict[str, Any]:
        padded = self._packed.cu_seqlens_q_padded
        ends = {"cu_seqlens": self._packed.cu_seqlens_q if padded is None else padded}
        # If there are more angles than max_seqlen, Megatron indexes them by position in the packed row.
        return ends | ({"max_seqlen": len(self._angles)} if _TAKES_LENGTH else {})


class _FirstNormAlone:
    # No residual is added before the first layer, so its first norm runs without the addition.
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.input_layernorm.after_add = self.layer_number > 1


@functools.cache
def _subclass(forward: type, own: type) -> type:
    return type(f"Engine{own.__name__}", (forward, own), {"__module__": __name__})


def follow_engine(layer: ModuleSpec) -> None:
    """Make a layer normalize and rotate as the engine does.

    Args:
        layer: a GPT model's layer whose norms are modules of their own; changed in place.
    """
    submodules, attention = layer.submodules, layer.submodules.self_attention
    layer.module = _subclass(_FirstNormAlone, layer.module)
    attention.module = _subclass(Rotating, attention.module)
    for owner, name, after_add in (
        (submodules, "input_layernorm", True),
        (submodules, "pre_mlp_layernorm", True),
        (attention.submodules, "q_layernorm", False),
        (attention.submodules, "k_layernorm", False),
    ):
        own = getattr(owner, name)
        if own not in (None, IdentityOp):
            setattr(owner, name, _norm(own, after_add=after_add))


def block_spec(spec: Any, config: Any, vp_stage: int | None) -> Any:
    """Return a spec of this stage's layers with a final norm that follows the engine.

    Args:
        spec: a layer's spec, or a block's, which is changed in place.
        config: Megatron's `TransformerConfig`.
        vp_stage: which virtual pipeline stage.

    Returns:
        `TransformerBlockSubmodules`.
    """
    if isinstance(spec, ModuleSpec):
        layers = [spec] * transformer_block.get_num_layers_to_build(config, vp_stage)
        spec = transformer_block.TransformerBlockSubmodules(layers, transformer_block.LayerNormImpl)
    spec.layer_norm = _norm(spec.layer_norm, after_add=True)
    return spec


def _norm(own: Any, *, after_add: bool) -> ModuleSpec:
    return ModuleSpec(EngineNorm, {"own": own, "after_add": after_add})
