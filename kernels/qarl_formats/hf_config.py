"""The `quantization_config` of config.json that makes stock vLLM 0.25.1 load a checkpoint in a format."""

from typing import Any

from qarl_formats.presets import FP8_BLOCK
from qarl_formats.record import QuantFormat


def quantization_config(fmt: QuantFormat, *, ignore: list[str]) -> dict[str, Any] | None:
    """Return what `config.json` says about the quantized linears.

    Args:
        fmt: the checkpoint's format.
        ignore: modules that stay BF16: names or `re:` patterns for compressed-tensors formats, exact names for
            fp8_block (vLLM's `fp8` method matches names exactly, so every layer's router must be listed).

    Returns:
        The dictionary, or None for bf16.

    Raises:
        ValueError: vLLM has no rollout kernel for the format.
    """
    if fmt.vllm is None:
        raise ValueError(f"format {fmt.name!r} is experimental: vLLM 0.25.1 has no kernel that serves it")
    return storage_config(fmt, ignore=ignore)


def storage_config(fmt: QuantFormat, *, ignore: list[str]) -> dict[str, Any] | None:
    """Return what `config.json` says about linears in this format, whether or not vLLM serves it.

    Args:
        fmt: the checkpoint's format.
        ignore: as for `quantization_config`.

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
    weights = {
        "num_bits": fmt.num_bits,
        "type": "int" if fmt.weight_kind in ("int", "int8_rows") else "float",
        "strategy": _strategy(fmt),
        "group_size": fmt.group_size or None,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    token_type = {"fp8_token": "float", "int8_token": "int"}.get(fmt.activation_kind)
    token_wise = {"num_bits": 8, "type": token_type, "strategy": "token", "symmetric": True, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt.storage,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": token_wise if token_type else None,
                "output_activations": None,
            }
        },
    }


def _strategy(fmt: QuantFormat) -> str:
    if fmt.tensor_scaled:
        return "tensor_group"
    return "group" if fmt.group_size else "channel"
