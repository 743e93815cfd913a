"""Dtypes of the optimizer's state: a YAML has names, Megatron needs torch's dtypes, and NeMo-RL does not convert."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.nemo_rl.lookup import look_up

OPTIMIZER = "policy.megatron_cfg.optimizer"
MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
# What Transformer-Engine's Adam accepts, except FP8 moments, whose scales NeMo-RL's checkpoints do not have.
_LEGAL = {
    "main_grads_dtype": ("float32", "bfloat16"),
    "main_params_dtype": ("float32", "float16"),
    **dict.fromkeys(MOMENTS, ("float32", "float16", "bfloat16")),
}


def has_16_bit_moments(optimizer: Mapping[str, Any]) -> bool:
    """Return whether both of Adam's moments have 16 bits in `policy.megatron_cfg.optimizer`: half as large a state."""
    return all(optimizer.get(key) in ("bfloat16", "float16") for key in MOMENTS)


def dtype_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which dtypes of the optimizer's state are not supported.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, value, why, and what to set.
    """
    optimizer = look_up(config, OPTIMIZER, None) or {}
    named = {key: optimizer[key] for key in _LEGAL if key in optimizer}
    problems = [
        f"{OPTIMIZER}.{key}={value}: not a type that the optimizer keeps; set {' or '.join(_LEGAL[key])}"
        for key, value in named.items()
        if value not in _LEGAL[key]
    ]
    smaller = [key for key, value in named.items() if value != "float32"]
    needed = ("use_precision_aware_optimizer", "use_distributed_optimizer")
    missing = [key for key in needed if not optimizer.get(key, False)]
    if smaller and missing:
        keys = " and ".join(f"{OPTIMIZER}.{key}" for key in missing)
        problems.append(
            f"{OPTIMIZER}: {', '.join(smaller)}: only Megatron's precision-aware, distributed Adam keeps other types "
            f"than float32; set {keys} to true, or float32"
        )
    return problems


def with_torch_dtypes(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Replace names by torch's dtypes in a copy of NeMo-RL's policy block, which has no `dtype_conflicts`."""
    import torch

    megatron = policy["megatron_cfg"]
    optimizer = {
        key: getattr(torch, value) if key in _LEGAL and isinstance(value, str) else value
        for key, value in megatron["optimizer"].items()
    }
    return {**policy, "megatron_cfg": {**megatron, "optimizer": optimizer}}
