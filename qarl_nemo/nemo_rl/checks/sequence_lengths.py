"""Checks a run's longest sequence against the model's positions, which vLLM does only once its workers have started."""

import os
from collections.abc import Mapping
from typing import Any

from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import read_model_config

_SERVED = "policy.generation.vllm_cfg.max_model_len"
_LONGEST = "policy.max_total_sequence_length"
_ENVIRONMENT = "policy.generation.vllm_cfg.env_vars"
# vLLM then warns only.
_ALLOW = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# The key of older models and that of newer ones.
_SCALINGS = ("rope_scaling", "rope_parameters")
# Scaling that does not lengthen what `max_position_embeddings` says.
_WHOLE = ("default", "su", "longrope", "llama3")


def length_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say whether an engine's sequences may be longer than its model has positions.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line, with the largest legal value; none if the model's config.json is not at hand or does not say.
    """
    key = _SERVED if look_up(config, _SERVED, None) is not None else _LONGEST
    model, length = read_model_config(config), look_up(config, key, None)
    most = None if model is None else longest_sequence(model)
    if most is None or not isinstance(length, int) or length <= most or _is_allowed(config):
        return []
    return [
        f"{key}={length}: vLLM serves this model with at most {most} tokens (max_position_embeddings, scaled, in its "
        f"config.json); set at most {most} there and in {_LONGEST}"
    ]


def longest_sequence(model: Mapping[str, Any]) -> int | None:
    """Return the longest sequence with which vLLM serves a model.

    Source: vLLM 0.25.1, `_get_and_verify_max_len` in config/model.py.

    Args:
        model: content of its config.json.

    Returns:
        Tokens; None if it is not plain from these keys.
    """
    positions, given = model.get("max_position_embeddings"), [key for key in _SCALINGS if model.get(key)]
    if not isinstance(positions, int) or model.get("model_max_length") or len(given) > 1:
        return None
    plain = scalings_of(model)
    if len(plain) < len(given):
        return None
    scaling = plain[given[0]] if given else {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in _WHOLE:
        return positions
    base = scaling.get("original_max_position_embeddings") if kind == "yarn" else positions
    factor = scaling.get("factor") or 1.0
    return int(base * factor) if isinstance(base, int) and isinstance(factor, int | float) else None


def scalings_of(model: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what a model's config.json says of its rotation by the keys that say it, where that is for all layers."""
    found = {key: model.get(key) for key in _SCALINGS}
    return {
        key: scaling
        for key, scaling in found.items()
        if isinstance(scaling, Mapping) and scaling and not any(isinstance(one, Mapping) for one in scaling.values())
    }


def _is_allowed(config: Mapping[str, Any]) -> bool:
    own = look_up(config, _ENVIRONMENT, None) or {}
    return str(own.get(_ALLOW, os.environ.get(_ALLOW, "0"))).strip().lower() in ("1", "true")
