"""A Hugging Face decoder's norms, attention and dense MLPs with the rollout engine's rounding points.

transformers rounds a normalized value before multiplying it by the weight, and both products of a rotation before
adding them; vLLM's kernels compute in FP32 and round once. A dense MLP rounds as transformers' does, in one kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qarl_nemo.layers.engine_rounding import normalize, rotate, swiglu


class EngineNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w in FP32, rounded once.

    Args:
        norm: the model's norm, whose weight is reused.
        after_add: the engine adds the residual in the same kernel.

    Source: vLLM 0.25.1 csrc/libtorch_stable/layernorm_kernels.cu.
    """

    def __init__(self, norm: Any, *, after_add: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.variance_epsilon
        self.after_add = after_add
        self.noise: Tensor | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last dimension: hidden_states [..., H] -> [..., H] in their dtype."""
        return normalize(hidden_states, self.weight, self.eps, after_add=self.after_add, noise=self.noise)


class EngineAttention(nn.Module):
    """Projections, norms of queries and keys if the model has them, rotation in FP32, attention.

    Args:
        attention: the model's attention, whose projections and norms are reused.
    """

    config: PreTrainedConfig
    layer_idx: int
    head_dim: int
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        for name, module in attention.named_children():
            self.add_module(name, module)
        for name in ("config", "layer_idx", "head_dim", "num_key_value_groups", "scaling", "is_causal"):
            setattr(self, name, getattr(attention, name))
        # Qwen's attention has a window for each layer, Mistral's has one in its config.
        window = None if hasattr(attention, "sliding_window") else getattr(attention.config, "sliding_window", None)
        self.sliding_window = getattr(attention, "sliding_window", window)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            hidden_states: [B, S, H].
            position_embeddings: cos and sin [B, S, head size].
            attention_mask: as transformers makes it; None is causal.
            past_key_values: keys and values of earlier tokens; these tokens' are added.
            options: what transformers passes to attention functions.

        Returns:
            [B, S, H], and None in place of the probabilities.
        """
        query, key, value = (
            getattr(self, f"{name}_proj")(hidden_states).unflatten(-1, (-1, self.head_dim)) for name in "qkv"
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate(x, *position_embeddings).transpose(1, 2) for x in (query, key))
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        return self.o_proj(self.attend(query, key, value, attention_mask, **options).flatten(2)), None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Mix values: each [B, heads, S, head size] -> [B, S, heads, head size]."""
        run = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        settings = {"scaling": self.scaling, "sliding_window": self.sliding_window, **options}
        return run(self, query, key, value, attention_mask, **settings)[0]


class EngineMLP(nn.Module):
    """y = down(silu(gate(x)) * up(x)), both factors and the product rounded.

    Args:
        mlp: the model's MLP, whose projections are reused.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        # By their names, under which aligned layers take their places.
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.add_module(name, mlp.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., H] -> [..., H] in its dtype."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def follow_engine(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model normalize, rotate and attend as the engine does, in place; parameters and their names stay."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            # The engine adds no residual before the first layer's norm, nor before those of queries and keys.
            alone = name.endswith(("q_norm", "k_norm", "layers.0.input_layernorm"))
            model.set_submodule(name, EngineNorm(module, after_add=not alone))
    for name, module in list(model.named_modules()):
        if name.endswith(".self_attn"):
            model.set_submodule(name, EngineAttention(module))
        elif _is_swiglu_mlp(module):
            model.set_submodule(name, EngineMLP(module))
    return model


def _is_swiglu_mlp(module: nn.Module) -> bool:
    # Of Qwen, Llama and Mistral.
    is_mlp = type(module).__name__.endswith("MLP") and not isinstance(module, EngineMLP)
    projects = {name for name, _ in module.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}
    return is_mlp and projects and isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def checkpoint_layers(model: PreTrainedModel, contexts: Callable[[], tuple[Any, Any]]) -> None:
    """Make a decoder's layers keep only their inputs for the backward, which computes the rest again.

    Args:
        model: changed in place.
        contexts: returns what a layer's forward and its recomputation run in; called at each forward.
    """
    for layer in model.model.layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
