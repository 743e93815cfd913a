"""Read a Hugging Face safetensors folder lazily: headers first, then one tensor at a time."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qarl_nemo.architecture import CONFIG_FILE
from qarl_nemo.checkpoints.hints import folder_hint, lfs_hint, no_folder
from qarl_nemo.files import FileError, read_json, require_file
from qarl_nemo.names import natural_key, summarize_names

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# For each kind of problem this many names are written out; the others are counted.
_SHOWN = 8
# Pages of a memory-mapped file stay resident while it is open; reopening it after this many bytes bounds them.
_REOPEN_AFTER_BYTES = 16 * 2**20
# What safetensors calls the dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about one tensor.

    Attributes:
        name: parameter name.
        shape: sizes.
        dtype: safetensors' name of the dtype, e.g. `BF16`.
        files: names of the files inside the checkpoint folder that hold it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    files: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * DTYPES.get(self.dtype, torch.uint8).itemsize


class TensorReader(Protocol):
    """Reads single tensors of a checkpoint in bounded memory, however large its files are."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def read(self, info: TensorInfo) -> Tensor:
        """Return one tensor of `tensors` on the CPU as stored, maybe as a view of the file: clone it to keep it."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose table of contents was read, but none of its tensors.

    Attributes:
        folder: where the weights are.
        companions: where config.json and the tokenizer are.
        config: content of config.json.
        tensors: every tensor under its Hugging Face name, in the order in which they are best read.
        open_reader: returns a reader of the tensors.
        tokenizer: where another tokenizer is that belongs to it; None: the one in `companions` does.
        adapters: what is recorded of the run whose adapters it lacks; None: it is a whole model.
    """

    folder: Path
    companions: Path
    config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    open_reader: Callable[[], TensorReader] = field(compare=False, repr=False)
    tokenizer: Path | None = None
    adapters: dict[str, Any] | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold weights, sorted."""
        return tuple(sorted({file for info in self.tensors for file in info.files}))


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read index, headers and config of a checkpoint folder.

    Args:
        folder: a Hugging Face checkpoint with `model.safetensors.index.json` or a single `model.safetensors`.

    Returns:
        The checkpoint's table of contents.

    Raises:
        ValueError: not a safetensors checkpoint, or files or tensors are missing or unreadable; all are listed.
    """
    folder = Path(folder)
    files = _weight_files(folder)
    problems = _stray_files(folder, files)
    config = read_config(folder, problems)
    tensors: list[TensorInfo] = []
    for file in sorted(files):
        tensors += _read_header(folder, file, files[file], problems)
    if problems:
        raise ValueError(f"checkpoint {folder} is incomplete:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return Checkpoint(folder, folder, config, tuple(tensors), lambda: SafetensorsReader(folder))


class SafetensorsReader:
    """Reads single tensors of a safetensors folder; resident memory stays bounded however large its files are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = ""
        self._handle: Any = None
        self._bytes_read = 0

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def read(self, info: TensorInfo) -> Tensor:
        """Return one tensor, see `TensorReader.read`."""
        (file,) = info.files
        if file != self._file or self._bytes_read >= _REOPEN_AFTER_BYTES:
            self._close()
            self._handle = safe_open(self._folder / file, framework="pt").__enter__()
            self._file = file
        self._bytes_read += info.num_bytes
        return self._handle.get_tensor(info.name)

    def _close(self) -> None:
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle, self._file, self._bytes_read = None, "", 0


def read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Args:
        folder: a Hugging Face model folder.
        problems: gets a sentence if there is none, or it is not a JSON object.

    Returns:
        The content, empty if there is none.
    """
    if not os.path.lexists(folder / CONFIG_FILE):
        problems.append(f"missing file {CONFIG_FILE}")
        return {}
    try:
        config = read_json(folder / CONFIG_FILE, "a model's config.json")
    except FileError as error:
        problems.append(str(error))
        return {}
    if not isinstance(config.get("quantization_config"), dict | None):
        problems.append(f"{CONFIG_FILE}: expected quantization_config, an object, or none")
        return {}
    return config


def _weight_files(folder: Path) -> Mapping[str, list[str] | None]:
    """Return file -> names the index promises for it (None: whatever the file holds)."""
    if absent := no_folder(folder):
        raise FileError(f"checkpoint {absent}")
    if os.path.lexists(folder / INDEX_FILE):
        return _index(folder / INDEX_FILE)
    if os.path.lexists(folder / SINGLE_FILE):
        return {SINGLE_FILE: None}
    raise FileError(f"checkpoint {folder} has neither {INDEX_FILE} nor {SINGLE_FILE}{_hint(folder)}")


def _hint(folder: Path) -> str:
    hint = folder_hint(folder)
    if hint:
        return hint
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if not pickled:
        return ""
    return (
        f"; it holds {', '.join(pickled[:_SHOWN])}, which are pickles and are never loaded: convert them with "
        "transformers' save_pretrained first"
    )


def _index(path: Path) -> dict[str, list[str]]:
    index = read_json(path, "an index of safetensors files")
    if not isinstance(index.get("metadata", {}), dict):
        raise FileError(f"{path}: expected metadata, an object, found {ascii(index['metadata'])[:80]}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(f"{path}: expected weight_map, an object of tensor name and file, and there is none")
    files: dict[str, list[str]] = {}
    wrong = []
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.isprintable() or file in ("", "..") or Path(file).name != file:
            wrong.append(f"{name!a}: {ascii(file)[:80]}")
        else:
            files.setdefault(file, []).append(name)
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise FileError(f"{path} names what is no file of the checkpoint's folder: {', '.join(wrong[:_SHOWN])}{more}")
    return files


def _stray_files(folder: Path, files: Mapping[str, list[str] | None]) -> list[str]:
    # Without an index engines read all of them; beside an index, transformers prefers the single file.
    stray = sorted(path.name for path in folder.glob("model*.safetensors") if path.name not in files)
    if not stray:
        return []
    more = f" and {len(stray) - _SHOWN} more" if len(stray) > _SHOWN else ""
    listed = f"{', '.join(stray[:_SHOWN])}{more}"
    return [f"weight files beside those of the checkpoint: {listed}; remove them, or name them in the index"]


def _read_header(folder: Path, file: str, names: list[str] | None, problems: list[str]) -> list[TensorInfo]:
    path = folder / file
    if not os.path.lexists(path):
        promised = f", which holds {summarize_names(names, _SHOWN)}" if names else ""
        problems.append(f"missing file {file}{promised}")
        return []
    try:
        require_file(path, "a safetensors file")
        with safe_open(path, framework="pt") as handle:
            present = set(handle.keys())
            wanted = present if names is None else set(names)
            if wanted - present:
                problems.append(f"{file} lacks tensors the index promises: {summarize_names(wanted - present, _SHOWN)}")
            if present - wanted:
                problems.append(
                    f"{file} holds tensors the index does not put there: {summarize_names(present - wanted, _SHOWN)}"
                )
            ordered = sorted(wanted & present, key=natural_key)
            slices = {name: handle.get_slice(name) for name in ordered}
            return [
                TensorInfo(name, tuple(view.get_shape()), view.get_dtype(), (file,)) for name, view in slices.items()
            ]
    except FileError as error:
        problems.append(str(error))
    except (SafetensorError, OSError, ValueError) as error:
        hint = lfs_hint(path)
        problems.append(f"{file} {hint}" if hint else f"{file} is not a readable safetensors file ({error})")
    return []
