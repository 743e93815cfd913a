"""Unpickle torch.distributed.checkpoint's `.metadata` and nothing else: a pickle may call whatever it names."""

import pickle
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

_CHECKPOINT = "torch.distributed.checkpoint."
_ALLOWED = {
    **dict.fromkeys(
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        _CHECKPOINT + "metadata",
    ),
    **dict.fromkeys(("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"), _CHECKPOINT + "planner"),
    "_StorageInfo": _CHECKPOINT + "filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
}
# Where the checkpoint was written to; the module's name differs between versions of Python.
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


def load_metadata(path: Path) -> Metadata:
    """Read a `.metadata` file; only the classes that torch itself writes there are built.

    Args:
        path: the file.

    Returns:
        The table of contents of the checkpoint.

    Raises:
        ValueError: the file names other classes (all of them are listed), or is no such file.
    """
    unpickler = _Unpickler(BytesIO(path.read_bytes()))
    try:
        content = unpickler.load()
    except Exception as error:
        # A broken pickle raises whatever its opcodes run into.
        unpickler.require_nothing_refused(path)
        raise ValueError(f"{path} is not a readable torch_dist table of contents ({error!r})") from error
    unpickler.require_nothing_refused(path)
    if not isinstance(content, Metadata):
        raise ValueError(f"{path} holds {type(content).__name__}, not torch.distributed.checkpoint's Metadata")
    return content


class _Refused:
    """Stands for a class that is not built, so that reading goes on and finds the others."""

    def __new__(cls, *_: Any, **__: Any) -> "_Refused":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self._refused: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if _ALLOWED.get(name) == module:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        self._refused.add(f"{module}.{name}")
        return _Refused

    def persistent_load(self, pid: Any) -> Any:
        self._refused.add(f"persistent object {pid!r}")
        return _Refused()

    def require_nothing_refused(self, path: Path) -> None:
        if self._refused:
            raise ValueError(
                f"{path} is a pickle that names {', '.join(sorted(self._refused))}; nothing but "
                "torch.distributed.checkpoint's own classes is ever built, so this file is not trusted"
            )
