"""Looks for what vLLM's attention would do by a model's config.json and NeMo-RL's learner would not."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.nemo_rl.checks.sequence_lengths import scalings_of
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import read_model_config

_LONGEST = "policy.max_total_sequence_length"
_OVERRIDES = "policy.hf_config_overrides"
# Those of which Megatron-Bridge tells Megatron: with any other the learner rotates by unscaled angles.
_ROTATED = ("default", "yarn")
# What NeMo-RL asserts in a learner's worker where a config's override, and not the model's config.json, says yarn.
_YARN_KEYS = (
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "truncate",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def attention_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say where the learner would attend or rotate otherwise than the engine.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        One line each; none if the model's config.json is not at hand.

    Source: Megatron-Bridge, `_hf_config_to_megatron_kwargs` and `provider_bridge` in conversion/model_bridge.py.
    """
    problems, model = _yarn_problems(config), read_model_config(config)
    if model is None:
        return problems
    for key, scaling in scalings_of(model).items():
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        said, legal = f"{_OVERRIDES}.{key}.rope_type={kind} (or config.json's)", "default or yarn"
        if kind not in _ROTATED:
            problems.append(f"{said}: vLLM scales its angles, and NeMo-RL's learner would not; set {legal}")
        elif kind != "default" and qarl.engine_rounding:
            problems.append(
                f"{said}: qarl.engine_rounding=true rotates by unscaled angles; set that to false, or default"
            )
    window, longest = model.get("sliding_window"), look_up(config, _LONGEST, None)
    if model.get("use_sliding_window") is True and isinstance(window, int) and longest and longest > window:
        problems.append(
            f"{_LONGEST}={longest}: by its config.json vLLM attends to the last {window} tokens, and NeMo-RL's learner "
            f"would to all; set at most {window}"
        )
    return problems


def _yarn_problems(config: Mapping[str, Any]) -> list[str]:
    key = f"{_OVERRIDES}.rope_scaling"
    scaling = look_up(config, key, None) or {}
    missing = [name for name in _YARN_KEYS if name not in scaling]
    if scaling.get("rope_type") != "yarn" or not missing:
        return []
    return [f"{key}.rope_type=yarn: NeMo-RL needs all of its settings there; set {', '.join(missing)}, too"]
