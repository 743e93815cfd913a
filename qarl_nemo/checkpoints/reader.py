"""Read a Hugging Face safetensors folder lazily: headers first, then one tensor at a time."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qarl_nemo.refit.names import natural_key

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# Pages of a memory-mapped file stay resident while it is open; reopening this often bounds them.
_REOPEN_AFTER_BYTES = 16 * 2**20
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


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
        return math.prod(self.shape) * _DTYPE_BYTES.get(self.dtype, 1)


class TensorReader(Protocol):
    """Reads single tensors of a checkpoint in bounded memory, however large its files are."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def read(self, info: TensorInfo) -> Tensor:
        """Return one tensor; clone what is to outlive its use, it may be a view of the file.

        Args:
            info: an entry of `Checkpoint.tensors`.

        Returns:
            The tensor on the CPU, as stored.
        """
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose table of contents was read; no tensor was.

    Attributes:
        folder: where the weights lie.
        companions: where config.json and the tokenizer lie.
        config: content of config.json.
        tensors: every tensor under its Hugging Face name, in the order they are best read.
        open_reader: returns a reader of the tensors.
    """

    folder: Path
    companions: Path
    config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    open_reader: Callable[[], TensorReader] = field(compare=False, repr=False)

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
    problems: list[str] = []
    config = read_config(folder, problems)
    tensors: list[TensorInfo] = []
    for file in sorted(files):
        tensors += _read_header(folder, file, files[file], problems)
    if problems:
        raise ValueError(f"checkpoint {folder} is incomplete:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return Checkpoint(folder, folder, config, tuple(tensors), lambda: SafetensorsReader(folder))


class SafetensorsReader:
    """Read single tensors of a safetensors folder; resident memory stays bounded however large its files are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = ""
        self._handle: Any = None
        self._bytes_read = 0

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def _weight_files(folder: Path) -> dict[str, list[str] | None]:
    """Return file -> names the index promises for it (None: whatever the file holds)."""
    if not folder.is_dir():
        raise ValueError(f"checkpoint {folder} is not a folder")
    if (folder / INDEX_FILE).is_file():
        weight_map = _load_json(folder / INDEX_FILE, lambda content: content["weight_map"].items())
        files: dict[str, list[str] | None] = {}
        for name, file in weight_map:
            files.setdefault(file, []).append(name)
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise ValueError(f"{folder / INDEX_FILE} points outside the checkpoint folder: {', '.join(outside)}")
        return files
    if (folder / SINGLE_FILE).is_file():
        return {SINGLE_FILE: None}
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    hint = (
        f"; it holds {', '.join(pickled)}, which are pickles and are never loaded: convert them with "
        "transformers' save_pretrained first"
        if pickled
        else ""
    )
    raise ValueError(f"checkpoint {folder} has neither {INDEX_FILE} nor {SINGLE_FILE}{hint}")


def _read_header(folder: Path, file: str, names: list[str] | None, problems: list[str]) -> list[TensorInfo]:
    path = folder / file
    if not path.is_file():
        problems.append(f"missing file {file}" + (f", which holds {', '.join(sorted(names))}" if names else ""))
        return []
    try:
        with safe_open(path, framework="pt") as handle:
            present = set(handle.keys())
            wanted = sorted(present if names is None else names, key=natural_key)
            missing = [name for name in wanted if name not in present]
            if missing:
                problems.append(f"{file} lacks tensors the index promises: {', '.join(missing)}")
            slices = {name: handle.get_slice(name) for name in wanted if name in present}
            return [
                TensorInfo(name, tuple(view.get_shape()), view.get_dtype(), (file,)) for name, view in slices.items()
            ]
    except SafetensorError as error:
        problems.append(f"{file} is not a readable safetensors file ({error})")
        return []


def read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Args:
        folder: a Hugging Face model folder.
        problems: gets a sentence when there is none.

    Returns:
        The content, empty when there is none.

    Raises:
        ValueError: the file is no JSON object.
    """
    if not (folder / CONFIG_FILE).is_file():
        problems.append(f"missing file {CONFIG_FILE}")
        return {}
    return _load_json(folder / CONFIG_FILE, dict)


def _load_json(path: Path, select: Callable[[Any], Any]) -> Any:
    try:
        return select(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a readable {path.name}: {error!r}") from error
