"""Quantized checkpoints read again: in which format they are, and their tensors under the names that refits give.

Tensors take the dtypes in which vLLM holds them, whose loaders copy into parameters made in the format's dtypes and so
round to nearest: other tools store the scales of int4 groups in FP16 or FP32, and those of FP8 in BF16.

Source: vLLM 0.25.1, `CompressedTensorsWNA16.create_weights`, `create_fp8_scale_parameter`, `parameter.py`'s `copy_`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_formats import QuantFormat
from qarl_nemo.checkpoints.hf_config import read_record
from qarl_nemo.checkpoints.reader import Checkpoint, TensorInfo, TensorReader
from qarl_nemo.checkpoints.scheme import stored_format
from qarl_nemo.names import GLOBAL_SCALE, TARGETS, expert_names, is_stacked_expert, layer_of, module_kind, target_of

# Name -> shape and dtype of every tensor that a model needs, stacked experts as one.
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_SHOWN = 8
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


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
        recorded = read_record(checkpoint.companions).get("format")
        scaled = {info.name.rpartition(".")[0] for info in checkpoint.tensors if _is_scale(info.name)}
        kinds = {module_kind(module) for module in scaled}
        left_out = [
            info.name.removesuffix(".weight")
            for info in checkpoint.tensors
            if target_of(info.name) in kinds and info.name.removesuffix(".weight") not in scaled
        ]
        targets = tuple(target for target in TARGETS if target in kinds)
        return cls(stored_format(quantization, recorded), targets, tuple(left_out))


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

    Raises:
        ValueError: at the end, scales that engines would round to 0 or infinity; all are listed.
    """
    infos, lost = stored_infos(checkpoint), []
    by_layer: dict[str, list[str]] = {}
    for name in layout:
        by_layer.setdefault(layer_of(name), []).append(name)
    with checkpoint.open_reader() as reader:
        for names in by_layer.values():
            found = {name: _read(reader, infos, name, layout[name], device, lost) for name in names}
            yield {name: tensor for name, tensor in found.items() if tensor is not None}
    if lost:
        listed = "\n  ".join(lost[:_SHOWN] + [f"and {len(lost) - _SHOWN} more"] * (len(lost) > _SHOWN))
        raise ValueError(f"{checkpoint.folder} has scales that engines cannot hold; quantize it anew:\n  {listed}")


def renaming(checkpoint: Checkpoint) -> Callable[[str], str]:
    """Return what turns a name of a quantized checkpoint into the one that updates give it, and back.

    Only scales of other tools have other names.
    """
    quantization = checkpoint.config.get("quantization_config") or {}
    fmt = stored_format(quantization)
    other = fmt.other_storage if fmt else None
    if other is None or quantization.get("format") != other.storage:
        return lambda name: name
    theirs, ours = other.scales
    swapped = {theirs: ours, ours: theirs}

    def renamed(name: str) -> str:
        suffix = name.rpartition(".")[2]
        return name.removesuffix(suffix) + swapped.get(suffix, suffix)

    return renamed


def stored_infos(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors by the names that updates give them, experts one by one."""
    renamed = renaming(checkpoint)
    return {renamed(info.name): info for info in checkpoint.tensors}


def in_engine_dtype(info: TensorInfo, stored: Tensor, dtype: torch.dtype, lost: list[str]) -> Tensor:
    """Return a stored tensor as engines hold it: parameters and scales rounded to nearest, codes as they are.

    Args:
        info: the tensor's entry in the table of contents.
        stored: what was read.
        dtype: that of the format; a dtype to which nothing is rounded leaves the tensor as it is.
        lost: gets a sentence if rounding makes a scale 0 or infinite.
    """
    if not {dtype, stored.dtype} <= _FLOATS:
        return stored
    rounded = stored.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(stored.dtype).max and _is_scale(info.name):
        gone = ((rounded == 0) & (stored != 0)) | (rounded.isinf() & ~stored.isinf())
        if gone.any():
            first = gone.nonzero()[0].tolist()
            lost.append(
                f"{info.name}: {int(gone.sum())} of {gone.numel()} become 0 or infinite in {dtype}, the first at "
                f"{first}: {stored[tuple(first)].item()}"
            )
    return rounded


def _is_scale(name: str) -> bool:
    return "scale" in name.rpartition(".")[2]


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
    lost: list[str],
) -> Tensor | None:
    shape, dtype = expected
    parts = stored_names(name, shape)
    if any(part not in infos for row in parts for part in row):
        return None

    def part(name: str) -> Tensor:
        # Experts are joined on the device, which spares the host two copies of each.
        return in_engine_dtype(infos[name], reader.read(infos[name]).to(device), dtype, lost)

    rows = _joined(name, ([part(one) for one in row] for row in parts))
    return torch.stack(rows) if is_stacked_expert(name) else rows[0]


def _joined(name: str, rows: Iterable[list[Tensor]]) -> list[Tensor]:
    if name.endswith(GLOBAL_SCALE):
        # Gate and up of an expert share their global scale, as engines take one. If two of them differ, all experts
        # keep both and are refused by their shape.
        rows = list(rows)
        if all(torch.equal(part, row[0]) for row in rows for part in row):
            return [row[0] for row in rows]
    return [torch.cat(row) for row in rows]
