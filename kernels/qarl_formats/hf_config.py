"""The `quantization_config` of config.json that makes stock vLLM 0.25.1 load a checkpoint in a format."""

from typing import Any

from qarl_formats.presets import FP8_BLOCK
from qarl_formats.record import QuantFormat, Storage


def quantization_config(fmt: QuantFormat, *, ignore: list[str]) -> dict[str, Any] | None:
    """Return what `config.json` says about the quantized linears.

    Args:
        fmt: the checkpoint's format.
        ignore: modules that stay BF16: names or `re:` patterns for compressed-tensors formats, exact names for
            fp8_block (vLLM's `fp8` method matches names exactly, so every layer's router must be listed).

    Returns:
        The dictionary, or None for bf16.
    """
    if fmt.storage is None:
        return None
    if fmt.storage == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": list(ignore),
        }
    return _compressed_tensors(fmt, fmt.storage, ignore)


def read_configs(fmt: QuantFormat) -> list[dict[str, Any]]:
    """Return what `config.json` may say about linears in this format, without modules that stay BF16."""
    own, other = quantization_config(fmt, ignore=[]), fmt.other_storage
    configs = [] if own is None else [own]
    return configs if other is None else [*configs, _compressed_tensors(fmt, other.storage, [])]


def _compressed_tensors(fmt: QuantFormat, storage: Storage, ignore: list[str]) -> dict[str, Any]:
    blocks = fmt.weight_kind == "fp8_blocks"
    weights = {
        "num_bits": fmt.num_bits,
        "type": "int" if fmt.weight_kind in ("int", "int8_rows") else "float",
        "strategy": _strategy(fmt),
        **({"block_structure": [FP8_BLOCK, FP8_BLOCK]} if blocks else {}),
        "group_size": None if blocks else fmt.group_size or None,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": _activations(fmt),
                "output_activations": None,
            }
        },
    }


def _activations(fmt: QuantFormat) -> dict[str, Any] | None:
    if fmt.activation_kind == "none":
        return None
    scaled = {"fp8_group": {"strategy": "group", "group_size": FP8_BLOCK}}.get(fmt.activation_kind)
    return {
        "num_bits": 8,
        "type": "int" if fmt.activation_kind == "int8_token" else "float",
        **(scaled or {"strategy": "token"}),
        "symmetric": True,
        "dynamic": True,
    }


def _strategy(fmt: QuantFormat) -> str:
    if fmt.weight_kind == "fp8_blocks":
        return "block"
    if fmt.tensor_scaled:
        return "tensor_group"
    return "group" if fmt.group_size else "channel"
