"""Checks a model's shapes against the parallel layouts of learner and engines, before any weight is read."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache

from qarl_formats import QuantFormat
from qarl_nemo.architecture import CONFIG_FILE, MEGATRON_FAMILIES, Architecture
from qarl_nemo.checkpoints.shapes import engine_problems
from qarl_nemo.config import ConfigError
from qarl_nemo.files import FileError, read_json
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.checks import require_supported
from qarl_nemo.memory import ModelSize
from qarl_nemo.nemo_rl.layout import MEGATRON, divided_counts, read_layout
from qarl_nemo.nemo_rl.lookup import look_up

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER = "policy.tokenizer.name"
_OVERRIDES = "policy.hf_config_overrides"
# What NeMo-RL and Bridge set for these models if a config does not.
_DEFAULTS = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "none",
    # Bridge's for Qwen3-MoE, which NeMo-RL leaves as it is.
    "moe_aux_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "alltoall",
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


def shape_conflicts(config: Mapping[str, Any], qarl: Any, model: Architecture | None) -> list[str]:
    """Say which shapes and settings of the model the learner or the engines could not run quantized.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.
        model: the run's; None if its config.json is not at hand.
    """
    try:
        fmt = qarl.served_format
    except ValueError as error:
        return [f"qarl.format={qarl.format}: {error}"]
    if model is None:
        return []
    policy = config.get("policy") or {}
    present, absent = ("experts", "mlp") if model.num_experts else ("mlp", "experts")
    if absent in qarl.targets:
        return [f"qarl.targets={list(qarl.targets)}: a {model.model_type} model has no {absent}; set [{present}]"]
    if present == "experts" and present not in qarl.targets:
        return [
            f"qarl.targets={list(qarl.targets)}: the learner aligns a MoE model's experts with all else; add experts"
        ]
    alignment = Alignment(fmt, qarl.targets, engine_rounding=qarl.engine_rounding)
    executed = qarl.executed_format.is_quantized
    return _learner_problems(config, model, alignment, executed=executed) + _engine_problems(
        policy, model, fmt, qarl.targets
    )


def fetch_model_config(name: str) -> str | None:
    """Make sure that a model's config.json is on this machine, fetching a hub model's into Hugging Face's cache.

    Args:
        name: `policy.model_name`.

    Returns:
        Why it could not be fetched, so that shapes and memory are not checked; None if it is on this machine.

    Raises:
        ConfigError: there is no such folder, and the name is not a hub model's; or the folder has no config.json.
    """
    if Path(name).is_dir():
        if not (Path(name) / CONFIG_FILE).is_file():
            raise ConfigError(
                f"policy.model_name={name}: the folder has no {CONFIG_FILE}, so that it is no model's; set a folder "
                "with one, or a name on the Hugging Face hub (owner/model)"
            )
        return None
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"policy.model_name={name}: no such folder, nor a name on the Hugging Face hub (owner/model)")
    try:
        hf_hub_download(name, CONFIG_FILE)
    # Without a network, an account or such a model, the hub's client raises errors of both types.
    except (OSError, ValueError) as error:
        return f"{name}: its config.json is not on this machine, and the hub did not give it: {_first_line(error)}"
    return None


def tokenizer_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say that `policy.tokenizer.name` is the path of no folder.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
    """
    name = look_up(config, _TOKENIZER, None)
    # A hub's tokenizer, unlike its model, may have a name without an owner; a reference is the launcher's to resolve.
    if not isinstance(name, str) or "${" in name or Path(name).is_dir():
        return []
    if _HUB_NAME.fullmatch(name if "/" in name else f"owner/{name}"):
        return []
    return [
        f"{_TOKENIZER}={name}: no such folder, nor a name on the Hugging Face hub (owner/model); set one of the two"
    ]


def read_model(config: Mapping[str, Any]) -> Architecture | None:
    """Read what a run makes its model from: config.json and `policy.hf_config_overrides`.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        The model; None if there is no config.json in the folder that `policy.model_name` is, or in Hugging Face's
        cache.

    Raises:
        FileError: the two are not of a supported model, or ask for layers that its checkpoint does not have.
    """
    path = _config_file(_name(config))
    if path is None:
        return None
    layers = read_json(path, "a model's config.json").get("num_hidden_layers")
    model = Architecture.parse(read_model_config(config) or {}, _place(config), MEGATRON_FAMILIES)
    if isinstance(layers, int) and model.num_hidden_layers > layers:
        raise FileError(
            f"{_place(config)}: the checkpoint has {layers} layers; set num_hidden_layers to at most {layers}"
        )
    return model


def read_model_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a run's config.json with `policy.hf_config_overrides` in it; None if it is not on this machine.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Raises:
        FileError: it cannot be read.
    """
    path = _config_file(_name(config))
    if path is None:
        return None
    return read_json(path, "a model's config.json") | dict(look_up(config, _OVERRIDES, None) or {})


def read_model_size(config: Mapping[str, Any]) -> ModelSize | None:
    """Read the sizes of a run's model.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        What memory depends on; None if the model's config.json is not on this machine.

    Raises:
        FileError: it is not a supported model, or its layers are not alike.
    """
    model = read_model(config)
    return None if model is None else ModelSize.of(model, _place(config))


def _config_file(name: str) -> Path | None:
    path = Path(name) / CONFIG_FILE
    if path.is_file():
        return path
    cached = try_to_load_from_cache(name, CONFIG_FILE) if _HUB_NAME.fullmatch(name) else None
    return Path(cached) if isinstance(cached, str) else None


def _name(config: Mapping[str, Any]) -> str:
    return str(look_up(config, "policy.model_name", ""))


def _place(config: Mapping[str, Any]) -> str:
    changed = look_up(config, _OVERRIDES, None)
    return f"policy.model_name={_name(config)}" + (f" with {_OVERRIDES}={dict(changed)}" if changed else "")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _learner_problems(
    config: Mapping[str, Any], model: Architecture, alignment: Alignment, *, executed: bool
) -> list[str]:
    given = look_up(config, MEGATRON, None) or {}
    shapes: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "moe_ffn_hidden_size": model.moe_intermediate_size or None,
        "num_moe_experts": model.num_experts or None,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
    }
    layout, counts = read_layout(config), divided_counts(model, alignment.targets)["tp"]
    if layout and any(count % layout.sizes["tp"] for count in counts.values()):
        # The check of layouts refuses that size, and knows what the GPUs leave, too.
        shapes["tensor_model_parallel_size"] = 1
    if not executed and "experts" not in alignment.targets:
        # A dense learner that publishes the format and multiplies by its masters may replay graphs.
        shapes["cuda_graph_impl"] = "none"
    settings = SimpleNamespace(**_DEFAULTS | dict(given) | (given.get("model_overrides") or {}) | shapes)
    try:
        require_supported(settings, alignment)
    except ValueError as error:
        return [f"policy.megatron_cfg: {line.strip()}" for line in str(error).splitlines()[1:]]
    return []


def _engine_problems(
    policy: Mapping[str, Any], model: Architecture, fmt: QuantFormat, targets: tuple[str, ...]
) -> list[str]:
    vllm = (policy.get("generation") or {}).get("vllm_cfg") or {}
    tensor_parallel, expert_parallel = vllm.get("tensor_parallel_size", 1), vllm.get("expert_parallel_size", 1)
    where = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor_parallel}"
    found = engine_problems(model, fmt, targets, tensor_parallel, whole_experts=expert_parallel > 1)
    return [f"qarl.targets {target}, {where}: {problem}" for target, problem in found]
