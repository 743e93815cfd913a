"""Checks a model's shapes against the parallel layouts of learner and engines, before any weight is read."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache

from qarl_formats import QuantFormat
from qarl_nemo.checkpoints.shapes import shape_problems
from qarl_nemo.config import ConfigError
from qarl_nemo.files import read_json
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.checks import require_supported

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MOE = "qwen3_moe"
_MODEL_TYPES = (_MOE, "qwen3", "qwen2")
# What NeMo-RL and Bridge set for these models if a config does not.
_DEFAULTS = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


def shape_conflicts(config: Mapping[str, Any], qarl: Any) -> list[str]:
    """Say which shapes and settings of the model the learner or the engines could not run quantized.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.

    Returns:
        One line for each problem; none for a model whose config.json is not on this machine.
    """
    try:
        fmt = qarl.served_format
    except ValueError as error:
        return [f"qarl.format={qarl.format}: {error}"]
    policy = config.get("policy") or {}
    model = read_model_config(str(policy.get("model_name", "")))
    if model is None:
        return []
    if model.get("model_type") not in _MODEL_TYPES:
        return [f"policy.model_name: a {model.get('model_type')} model; legal are {', '.join(_MODEL_TYPES)}"]
    present, absent = ("experts", "mlp") if model["model_type"] == _MOE else ("mlp", "experts")
    if absent in qarl.targets:
        return [f"qarl.targets={list(qarl.targets)}: a {model['model_type']} model has no {absent}; set [{present}]"]
    alignment = Alignment(fmt, qarl.targets, engine_rounding=qarl.engine_rounding)
    return _learner_problems(policy, model, alignment) + _engine_problems(policy, model, fmt, qarl.targets)


def fetch_model_config(name: str) -> str | None:
    """Make sure that a model's config.json is on this machine, fetching a hub model's into Hugging Face's cache.

    Args:
        name: `policy.model_name`.

    Returns:
        Why it could not be fetched, so that shapes and memory are not checked; None if it is on this machine.

    Raises:
        ConfigError: there is no such folder, and the name is not a hub model's.
    """
    if Path(name).is_dir():
        return None
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"policy.model_name={name}: no such folder, nor a name on the Hugging Face hub (owner/model)")
    try:
        hf_hub_download(name, "config.json")
    # Without a network, an account or such a model, the hub's client raises errors of both types.
    except (OSError, ValueError) as error:
        return f"{name}: its config.json is not on this machine, and the hub did not give it: {_first_line(error)}"
    return None


def model_config_file(name: str) -> Path | None:
    """Return the path of config.json in a folder or in Hugging Face's cache; None if there is neither."""
    path = Path(name) / "config.json"
    if path.is_file():
        return path
    cached = try_to_load_from_cache(name, "config.json") if _HUB_NAME.fullmatch(name) else None
    return Path(cached) if isinstance(cached, str) else None


def read_model_config(name: str) -> dict[str, Any] | None:
    """Read a model's config.json if it is on this machine.

    Args:
        name: `policy.model_name`.

    Returns:
        Its content; None if there is none.

    Raises:
        FileError: it is not a config.
    """
    path = model_config_file(name)
    return None if path is None else read_json(path, "a model's config.json")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _learner_problems(policy: Mapping[str, Any], model: Mapping[str, Any], alignment: Alignment) -> list[str]:
    given = policy.get("megatron_cfg") or {}
    shapes = {
        "hidden_size": model["hidden_size"],
        "ffn_hidden_size": model["intermediate_size"],
        "moe_ffn_hidden_size": model.get("moe_intermediate_size"),
        "num_moe_experts": model.get("num_experts", model.get("num_local_experts")),
        "num_attention_heads": model["num_attention_heads"],
        "num_query_groups": model["num_key_value_heads"],
        "kv_channels": _head_dim(model),
    }
    settings = SimpleNamespace(**_DEFAULTS | dict(given) | (given.get("model_overrides") or {}) | shapes)
    try:
        require_supported(settings, alignment)
    except ValueError as error:
        return [f"policy.megatron_cfg: {line.strip()}" for line in str(error).splitlines()[1:]]
    return []


def _engine_problems(
    policy: Mapping[str, Any], model: Mapping[str, Any], fmt: QuantFormat, targets: tuple[str, ...]
) -> list[str]:
    vllm = (policy.get("generation") or {}).get("vllm_cfg") or {}
    tensor_parallel, expert_parallel = vllm.get("tensor_parallel_size", 1), vllm.get("expert_parallel_size", 1)
    problems: dict[str, None] = {}
    for target in targets:
        whole = target == "experts" and expert_parallel > 1
        parts = 1 if whole else tensor_parallel
        where = f"qarl.targets {target}, policy.generation.vllm_cfg.tensor_parallel_size={tensor_parallel}"
        for name, shape in _shards(model, target, parts).items():
            for problem in shape_problems(f"{name}.weight", target, shape, fmt):
                problems[f"{where}: {name}: {problem}"] = None
    return list(problems)


def _shards(model: Mapping[str, Any], target: str, parts: int) -> dict[str, tuple[int, int]]:
    hidden, head_dim = model["hidden_size"], _head_dim(model)
    if target == "attention":
        query, key = (model[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
        return {
            "q_proj": (query // parts, hidden),
            "k_proj": (max(key // parts, head_dim), hidden),
            "o_proj": (hidden, query // parts),
        }
    inner = model["moe_intermediate_size" if target == "experts" else "intermediate_size"] // parts
    return {"gate_proj": (inner, hidden), "down_proj": (hidden, inner)}


def _head_dim(model: Mapping[str, Any]) -> int:
    return model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
