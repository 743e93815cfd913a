"""Looks for settings of the learner's model alone that change what it computes, which the engine would not follow."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.nemo_rl.checks.lines import problem_line
from qarl_nemo.nemo_rl.layout import MEGATRON
from qarl_nemo.nemo_rl.lookup import look_up

_OVERRIDES = f"{MEGATRON}.model_overrides"
# Legal values; what vLLM computes with is in the model's config.json and `policy.hf_config_overrides`.
_OF_BOTH: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (None, 0),
    "hidden_dropout": (None, 0),
    **dict.fromkeys(
        (
            "layernorm_epsilon",
            "moe_router_topk",
            "num_layers",
            "rope_scaling",
            "rope_scaling_factor",
            "rotary_base",
            "rotary_percent",
            "seq_len_interpolation_factor",
            "softmax_scale",
            "window_size",
        ),
        (None, False),
    ),
}


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
