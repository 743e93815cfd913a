"""What a `.metadata` file says about tensors, each value checked before anything is computed from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from qarl_nemo.checkpoints.restricted_pickle import Inert, load_metadata
from qarl_nemo.checkpoints.stored_tensor import Chunk, StoredTensor
from qarl_nemo.files import FileError

Offsets = tuple[int, ...]
# Real sizes are smaller, and arithmetic on numbers below this is fast, unlike on the huge ones a damaged file may hold.
_MAX_NUMBER = 1 << 62


def read_table_of_contents(path: Path, wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """Read the tensors of a `.metadata` file.

    Args:
        path: the file.
        wanted: says which keys matter; others may be anything.

    Returns:
        The wanted tensors by key.

    Raises:
        FileError: the file is not what torch writes; the message names the key and the field.
    """
    return _Table(path).tensors(load_metadata(path), wanted)


class _Table:
    """The fields of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tensors(self, metadata: Inert, wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
        content = self._fields(metadata, "Metadata", "its content")
        entries = self._of_type(content.get("state_dict_metadata"), dict, "state_dict_metadata")
        storage = self._of_type(content.get("storage_data"), dict, "storage_data")
        kept = {
            self._of_type(key, str, "a key of state_dict_metadata"): entry
            for key, entry in entries.items()
            if not isinstance(key, str) or wanted(key)
        }
        tensors = {key: entry for key, entry in kept.items() if _name(entry) != "BytesStorageMetadata"}
        places = self._places(storage, tensors)
        return {key: self._tensor(key, entry, places.get(key, {})) for key, entry in tensors.items()}

    def _places(self, storage: dict[Any, Any], tensors: dict[str, Any]) -> dict[str, dict[Offsets, Chunk]]:
        """Return chunks by key and offsets, their sizes still unknown."""
        places: dict[str, dict[Offsets, Chunk]] = {}
        for index, info in storage.items():
            where = self._fields(index, "MetadataIndex", "a key of storage_data")
            key = where.get("fqn")
            if not isinstance(key, str) or key not in tensors:
                continue
            offsets = self._sizes(where.get("offset"), f"{key}: offset in storage_data")
            facts = self._fields(info, "_StorageInfo", f"{key}: its entry of storage_data")
            place = f"{key} at {list(offsets)}: "
            transforms = facts.get("transform_descriptors") or []
            chunk = Chunk(
                offsets,
                (),
                self._of_type(facts.get("relative_path"), str, place + "relative_path"),
                self._number(facts.get("offset"), place + "offset"),
                self._number(facts.get("length"), place + "length"),
                tuple(str(name) for name in self._of_type(transforms, list, place + "transform_descriptors")),
            )
            if offsets in places.setdefault(key, {}):
                self._refuse(f"{place}storage_data", "one place", "two")
            places[key][offsets] = chunk
        return places

    def _tensor(self, key: str, entry: Any, places: dict[Offsets, Chunk]) -> StoredTensor:
        facts = self._fields(entry, "TensorStorageMetadata", key)
        properties = facts.get("properties")
        state = properties.state if _name(properties) == "TensorProperties" else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        shape = self._sizes(facts.get("size"), f"{key}: size")
        chunks = []
        for number, chunk in enumerate(self._of_type(facts.get("chunks"), list, f"{key}: chunks")):
            box = self._fields(chunk, "ChunkStorageMetadata", f"{key}: chunk {number}")
            offsets, sizes = (
                self._sizes(box.get(field), f"{key}: {field} of chunk {number}") for field in ("offsets", "sizes")
            )
            if not len(offsets) == len(sizes) == len(shape):
                self._refuse(f"{key}: chunk {number}", f"{len(shape)} dimensions", f"{list(offsets)}, {list(sizes)}")
            place = places.get(offsets, Chunk((), (), "", 0, 0, ()))
            chunks.append(Chunk(offsets, sizes, place.file, place.position, place.num_bytes, place.transforms))
        return StoredTensor(key, shape, self._of_type(dtype, torch.dtype, f"{key}: dtype"), tuple(chunks))

    def _fields(self, value: Any, name: str, place: str) -> dict[str, Any]:
        if _name(value) != name or not isinstance(value.state, dict):
            self._refuse(place, name, _shown(value))
        return value.state

    def _sizes(self, value: Any, place: str) -> Offsets:
        numbers = value.state[0] if _name(value) == "Size" and isinstance(value.state, tuple) and value.state else None
        if not isinstance(numbers, tuple | list):
            self._refuse(place, "a torch.Size", _shown(value))
        return tuple(self._number(number, place) for number in numbers)

    def _number(self, value: Any, place: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_NUMBER:
            self._refuse(place, "a number from 0 to 2^62", _shown(value))
        return value

    def _of_type(self, value: Any, kind: type, place: str) -> Any:
        if not isinstance(value, kind):
            self._refuse(place, kind.__name__, _shown(value))
        return value

    def _refuse(self, place: str, expected: str, found: str) -> NoReturn:
        raise FileError(
            f"{self._path}: {place}: expected {expected}, found {found}; the file is damaged, copy or save it again"
        )


def _name(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Inert) else ""


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, int | float | str | None) else type(value).__name__
