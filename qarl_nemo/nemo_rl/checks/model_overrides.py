"""Looks for settings of the learner's model alone that change what it computes, which the engine would not follow."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.nemo_rl.checks.lines import problem_line
from qarl_nemo.nemo_rl.layout import MEGATRON
from qarl_nemo.nemo_rl.lookup import look_up

_OVERRIDES = f"{MEGATRON}.model_overrides"
# What the model's config.json and `policy.hf_config_overrides` say, which vLLM computes with.
_OF_CONFIG = (
    "activation_func",
    "add_qkv_bias",
    "ffn_hidden_size",
    "gated_linear_unit",
    "hidden_size",
    "kv_channels",
    "layernorm_epsilon",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk",
    "normalization",
    "num_attention_heads",
    "num_layers",
    "num_moe_experts",
    "num_query_groups",
    "position_embedding_type",
    "qk_layernorm",
    "rotary_base",
    "rotary_percent",
    "share_embeddings_and_output_weights",
    "softmax_type",
    "vocab_size",
)
# What no supported model has.
_OF_OTHERS = (
    "activation_func_clamp_value",
    "apply_residual_connection_post_layernorm",
    "attention_dropout",
    "attention_output_gate",
    "glu_linear_offset",
    "hidden_dropout",
    "layernorm_zero_centered_gamma",
    "mrope_section",
    "multi_latent_attention",
    "no_rope_freq",
    "qk_l2_norm",
    "rope_scaling",
    "rope_scaling_factor",
    "rotary_interleaved",
    "seq_len_interpolation_factor",
    "softmax_scale",
    "window_attn_skip_freq",
    "window_size",
)
# Legal values.
_OF_BOTH: dict[str, tuple[Any, ...]] = dict.fromkeys(_OF_CONFIG, (None,)) | dict.fromkeys(_OF_OTHERS, (None, False, 0))


def override_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which overrides of the learner's model would make it another model than the engine's.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, value, why, and what to set.

    Source: NeMo-RL 7ea279ab, `_merge_model_overrides` in `models/megatron/setup.py`.
    """
    given = look_up(config, _OVERRIDES, None) or {}
    why = "the learner alone would compute with it, and engines by the model's config.json"
    return [
        problem_line(
            f"{_OVERRIDES}.{name}", given[name], why, "what both read in policy.hf_config_overrides, and nothing here"
        )
        for name, legal in _OF_BOTH.items()
        if name in given and given[name] not in legal
    ]
