"""Unpickle torch.distributed.checkpoint's `.metadata` and nothing else, because a pickle can call whatever it names.

Not even the classes that torch writes there are built. A pickle can set attributes of whatever it refers to, classes as
well as instances, and an attribute set on a class outlives the file. So a class made here stands for each of them; its
instances keep what they were given and do nothing.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from qarl_nemo.files import FileError, require_file

_CHECKPOINT = "torch.distributed.checkpoint."
_WRITTEN_BY_TORCH = (
    *(
        (_CHECKPOINT + "metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((_CHECKPOINT + "planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    (_CHECKPOINT + "filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # The path the checkpoint was written to; the module's name differs between versions of Python.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
)


class Inert:
    """Stands for an object of some class and keeps what the pickle says it is made of.

    Attributes:
        state: its state, or the arguments it was made with; may be anything.
    """

    __slots__ = ("state",)

    def __new__(cls, *arguments: Any, **_: Any) -> "Inert":
        """Keep the arguments of the call that the pickle believes it makes."""
        made = super().__new__(cls)
        made.state = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        # A pickle that sets a class's state instead of an instance's finds this function, which then lacks an argument.
        self.state = state


_INERT = {place: type(place[1], (Inert,), {"__slots__": ()}) for place in _WRITTEN_BY_TORCH}


def load_metadata(path: Path) -> Inert:
    """Read a `.metadata` file; no class that it names is built.

    Returns:
        The table of contents, an `Inert` named `Metadata` that holds others; nothing in it was checked.

    Raises:
        FileError: the file names classes that torch does not write there (all are listed), or is not such a file.
    """
    require_file(path, "a torch_dist table of contents")
    unpickler = _Unpickler(BytesIO(path.read_bytes()))
    try:
        content = unpickler.load()
    except Exception as error:
        # A broken pickle may raise anything.
        unpickler.require_nothing_refused(path)
        raise FileError(f"{path} is not a readable torch_dist table of contents ({error!r})") from error
    unpickler.require_nothing_refused(path)
    if not isinstance(content, Inert) or type(content).__name__ != "Metadata":
        raise FileError(f"{path} holds {type(content).__name__}, not torch.distributed.checkpoint's Metadata")
    return content


class _Refused(Inert):
    """Stands for a class that torch does not write; reading goes on to find the others."""

    __slots__ = ()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self._refused: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INERT:
            return _INERT[module, name]
        # Dtypes are safe: they have no attributes that could be set.
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        self._refused.add(f"{module}.{name}")
        return _Refused

    def persistent_load(self, pid: Any) -> Any:
        self._refused.add(f"persistent object {pid!r}")
        return _Refused()

    def require_nothing_refused(self, path: Path) -> None:
        if self._refused:
            raise FileError(
                f"{path} is a pickle that names {', '.join(sorted(self._refused))}; nothing but "
                "torch.distributed.checkpoint's own classes is ever read, so this file is not trusted"
            )
