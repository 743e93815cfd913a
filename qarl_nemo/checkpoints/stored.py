"""Quantized checkpoints read again: in which format they are, and their tensors under the names that refits give."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl_formats import FORMAT_NAMES, NARROW_NAMES, QuantFormat, get_format, storage_config
from qarl_nemo.checkpoints.hf_config import RECORD_FILE
from qarl_nemo.checkpoints.reader import Checkpoint, TensorInfo, TensorReader
from qarl_nemo.files import read_json
from qarl_nemo.names import GLOBAL_SCALE, TARGETS, expert_names, is_stacked_expert, layer_of, module_kind, target_of

# Name -> shape and dtype of every tensor that a model needs, stacked experts as one.
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_READ_NAMES = (*FORMAT_NAMES, *NARROW_NAMES)
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
# What decides how compressed-tensors' codes are read.
_ARITHMETIC = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "actorder")
# Orders of calibration that leave columns and groups where they are.
_PLAIN_ORDERS = ("weight", "static", False)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint's quantized tensors are stored.

    Attributes:
        format: the record with its group size; None if it is none of ours.
        targets: which layers are in that format.
        left_out: modules of these targets that are not.
    """

    format: QuantFormat | None
    targets: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Stored | None":
        """Say how a checkpoint is quantized; None if its config.json says that it is not."""
        quantization = checkpoint.config.get("quantization_config")
        if not quantization:
            return None
        record = checkpoint.companions / RECORD_FILE
        recorded = read_json(record, "the record of a quantized checkpoint").get("format") if record.is_file() else None
        scaled = {
            info.name.rpartition(".")[0] for info in checkpoint.tensors if "scale" in info.name.rpartition(".")[2]
        }
        kinds = {module_kind(module) for module in scaled}
        left_out = [
            info.name.removesuffix(".weight")
            for info in checkpoint.tensors
            if target_of(info.name) in kinds and info.name.removesuffix(".weight") not in scaled
        ]
        targets = tuple(target for target in TARGETS if target in kinds)
        return cls(stored_format(quantization, recorded), targets, tuple(left_out))


def stored_format(quantization: dict[str, Any], recorded: object = None) -> QuantFormat | None:
    """Return the format in which a checkpoint's tensors are stored.

    Args:
        quantization: config.json's `quantization_config`.
        recorded: what `qarl quantize` called it; config.json does not tell a narrow grid from the one of `w4a16`.

    Returns:
        The record with its group size; None if it is none of ours.
    """
    for name in sorted(_READ_NAMES, key=lambda name: name != recorded):
        sizes = get_format(name).group_sizes or (None,)
        for fmt in (get_format(name, group_size=size) for size in sizes):
            own = storage_config(fmt, ignore=[])
            if own is not None and _arithmetic(own) == _arithmetic(quantization):
                return fmt
    return None


def _arithmetic(quantization: dict[str, Any]) -> Any:
    """Return what decides how stored tensors are read, without lists of modules and notes of the calibration."""
    if quantization.get("quant_method") != "compressed-tensors":
        return [quantization.get(key) for key in ("quant_method", "fmt", "activation_scheme", "weight_block_size")]
    groups = quantization.get("config_groups")
    found: list[Any] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        sides = [_side(group.get(side)) for side in ("weights", "input_activations")]
        # Groups may differ in nothing but the modules that they name.
        found += [] if sides in found else [sides]
    rotated = quantization.get("transform_config") or None
    return [quantization.get("format"), quantization.get("kv_cache_scheme"), rotated, found]


def _side(said: Mapping[str, Any] | None) -> list[Any] | None:
    if not said:
        return None
    return [None if key == "actorder" and said.get(key) in _PLAIN_ORDERS else said.get(key) for key in _ARITHMETIC]


def stored_layers(
    checkpoint: Checkpoint, layout: Layout, device: torch.device | None = None
) -> Iterator[dict[str, Tensor]]:
    """Read a checkpoint's tensors under the names that updates give them.

    Args:
        checkpoint: one tensor for each expert, quantized or not.
        layout: what an update holds.
        device: where they go; None for the CPU.

    Yields:
        The tensors of one decoder layer after another; a name that the checkpoint lacks is left out.
    """
    infos = {info.name: info for info in checkpoint.tensors}
    by_layer: dict[str, list[str]] = {}
    for name in layout:
        by_layer.setdefault(layer_of(name), []).append(name)
    with checkpoint.open_reader() as reader:
        for names in by_layer.values():
            found = {name: _read(reader, infos, name, layout[name], device) for name in names}
            yield {name: tensor for name, tensor in found.items() if tensor is not None}


def stored_names(name: str, shape: tuple[int, ...]) -> list[list[str]]:
    """Return the names of the tensors that a checkpoint holds in the place of one in a layout.

    Args:
        name: one of the layout's.
        shape: its shape there.

    Returns:
        For each expert of a stack, else once, those that follow one another.
    """
    return expert_names(name, shape[0]) if is_stacked_expert(name) else [[name]]


def _read(
    reader: TensorReader,
    infos: dict[str, TensorInfo],
    name: str,
    expected: tuple[tuple[int, ...], torch.dtype],
    device: torch.device | None,
) -> Tensor | None:
    shape, dtype = expected
    parts = stored_names(name, shape)
    if any(part not in infos for row in parts for part in row):
        return None
    # Experts are joined on the device, which spares the host two copies of each.
    rows = [_joined(name, [reader.read(infos[part]).to(device) for part in row]) for row in parts]
    whole = torch.stack(rows) if is_stacked_expert(name) else rows[0]
    # Parameters take the engine's dtype, and FP32 scales hold those that other tools store in 16 bits; codes and all
    # other scales stay as they are stored, and would be refused if they were others.
    is_parameter = name.endswith((".weight", ".bias")) and {dtype, whole.dtype} <= _FLOATS
    return whole.to(dtype) if is_parameter or (dtype == torch.float32 and whole.dtype in _FLOATS) else whole


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    # Gate and up of an expert share their global scale. Two of them are refused by their shape, as engines take one.
    same = name.endswith(GLOBAL_SCALE) and all(torch.equal(part, parts[0]) for part in parts)
    return parts[0] if same else torch.cat(parts)
