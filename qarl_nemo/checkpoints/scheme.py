"""In which of our formats a `quantization_config` says that tensors are stored, whoever wrote it."""

from collections.abc import Iterator, Mapping
from typing import Any

from qarl_formats import FORMAT_NAMES, NARROW_NAMES, WIDE_NAMES, QuantFormat, get_format, read_configs

# Name, and whether its codes are stored in their own width.
_READ = [(name, False) for name in (*FORMAT_NAMES, *NARROW_NAMES, *WIDE_NAMES)] + [
    (name, True) for name in NARROW_NAMES
]
# What decides how compressed-tensors' codes are read.
_ARITHMETIC = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "dynamic", "actorder")
# Orders of calibration that leave columns and groups where they are.
_PLAIN_ORDERS = ("weight", "static", False)


def stored_format(quantization: dict[str, Any], recorded: object = None) -> QuantFormat | None:
    """Return the format in which a checkpoint's tensors are stored.

    Args:
        quantization: config.json's `quantization_config`.
        recorded: what `qarl quantize` called it; config.json does not tell a narrow grid from the one of `w4a16`.

    Returns:
        The record with its group size; None if it is none of ours.
    """
    said = _arithmetic(quantization)
    known = sorted(_known(), key=lambda one: one[0].name != recorded)
    return next((fmt for fmt, own in known if own == said), None)


def nearest_format(quantization: dict[str, Any]) -> str:
    """Say which format comes closest to a checkpoint's that is none of ours, and where they differ."""
    said = _arithmetic(quantization)

    def differences(own: dict[str, Any]) -> list[str]:
        keys = [key for key in said | own if said.get(key) != own.get(key)]
        return [f"{key}={said.get(key)!r} in place of {own.get(key)!r}" for key in keys]

    fmt, own = min(_known(), key=lambda one: len(differences(one[1])))
    return f"nearest is {fmt.name}, but it says {', '.join(differences(own))}"


def _known() -> list[tuple[QuantFormat, dict[str, Any]]]:
    sizes = [(name, own, size) for name, own in _READ for size in get_format(name).group_sizes or (None,)]
    formats = [get_format(name, group_size=size, own_width=own) for name, own, size in sizes]
    return [(fmt, _arithmetic(config)) for fmt in formats for config in read_configs(fmt)]


def _arithmetic(quantization: dict[str, Any]) -> dict[str, Any]:
    """Return what decides how stored tensors are read, without lists of modules and notes of the calibration."""
    if quantization.get("quant_method") != "compressed-tensors":
        keys = ("quant_method", "fmt", "activation_scheme", "weight_block_size")
        return {key: quantization.get(key) for key in keys}
    groups = quantization.get("config_groups")
    found: list[dict[str, Any]] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        sides = {key: value for side in ("weights", "input_activations") for key, value in _side(group, side)}
        # Groups may differ in nothing but the modules that they name.
        found += [] if sides in found else [sides]
    keys = ("quant_method", "format", "kv_cache_scheme", "transform_config")
    read = {key: quantization.get(key) or None for key in keys}
    return read | (found[0] if len(found) == 1 else {"config_groups": found})


def _side(group: object, side: str) -> Iterator[tuple[str, Any]]:
    said = group.get(side) if isinstance(group, Mapping) else group
    if not isinstance(said, Mapping) or not said:
        yield side, said or None
        return
    for key in _ARITHMETIC:
        value = said.get(key)
        if key == "block_structure" and isinstance(value, str):
            # An earlier spelling, 128x128.
            value = [int(size) for size in value.split("x") if size.isdigit()]
        yield f"{side}.{key}", None if key == "actorder" and value in _PLAIN_ORDERS else value
