"""Damage that knows torch_dist's table of contents: chunks that contradict each other, other types, hostile pickles."""

import contextlib
import io
import pickle
import random
from typing import Any

import torch
from edits import Content
from torch.distributed.checkpoint.metadata import Metadata
from trees import VALUES

_DEPTH = 3000


def edit_metadata(rng: random.Random, data: bytes) -> Content:
    """Damage a `.metadata` that this campaign wrote itself."""
    if rng.random() < 0.1:
        name = rng.choice(sorted(_HOSTILE))
        return f"a pickle that is {name}", _HOSTILE[name]
    while True:
        with contextlib.suppress(
            RuntimeError, AttributeError, TypeError
        ):  # what torch itself does not pickle, no file holds
            return _contradiction(rng, data)


def _contradiction(rng: random.Random, data: bytes) -> Content:
    # The file is the campaign's own.
    metadata: Metadata = pickle.loads(data)
    weights = sorted(
        key for key in metadata.state_dict_metadata if not key.startswith("optimizer.") and "_extra" not in key
    )
    key = rng.choice(weights)
    what = rng.choice(_EDITS)(rng, metadata, key)
    buffer = io.BytesIO()
    pickle.dump(metadata, buffer)
    return f"{key}: {what}", buffer.getvalue()


def _lose_tensor(_: random.Random, metadata: Metadata, key: str) -> str:
    del metadata.state_dict_metadata[key]
    return "not listed"


def _rename(_: random.Random, metadata: Metadata, key: str) -> str:
    metadata.state_dict_metadata[key + "x"] = metadata.state_dict_metadata.pop(key)
    return "renamed"


def _lose_chunk(rng: random.Random, metadata: Metadata, key: str) -> str:
    chunks = metadata.state_dict_metadata[key].chunks
    del chunks[rng.randrange(len(chunks))]
    return "a chunk is not listed"


def _double_chunk(rng: random.Random, metadata: Metadata, key: str) -> str:
    chunks = metadata.state_dict_metadata[key].chunks
    chunks.append(rng.choice(chunks))
    return "a chunk is listed twice"


def _resize(rng: random.Random, metadata: Metadata, key: str) -> str:
    entry = metadata.state_dict_metadata[key]
    sizes = list(entry.size)
    sizes[rng.randrange(len(sizes))] += rng.choice((1, -1, 10**6, 2**40))
    entry.size = torch.Size(max(size, 0) for size in sizes)
    return f"size {sizes}"


def _move_chunk(rng: random.Random, metadata: Metadata, key: str) -> str:
    chunk = rng.choice(metadata.state_dict_metadata[key].chunks)
    field = rng.choice(("offsets", "sizes"))
    values = list(getattr(chunk, field))
    values[rng.randrange(len(values))] += rng.choice((1, -1, 64, 2**40))
    object.__setattr__(chunk, field, rng.choice((torch.Size, tuple, list))(max(value, 0) for value in values))
    return f"a chunk's {field} {values}"


def _misplace(rng: random.Random, metadata: Metadata, key: str) -> str:
    place = _place(rng, metadata, key)
    field = rng.choice(("relative_path", "offset", "length"))
    old = getattr(place, field)
    values = ("../out.distcp", "/dev/zero", "", "nothing.distcp", ".metadata", "__0_0.distcp/..")
    numbers = (-1, 0, 1, old + 1, old - 1, 2**62) if isinstance(old, int) else ()
    new = rng.choice(values if field == "relative_path" else numbers)
    object.__setattr__(place, field, new)
    return f"its {field} {old} -> {new}"


def _retype(rng: random.Random, metadata: Metadata, key: str) -> str:
    entry = metadata.state_dict_metadata[key]
    objects: list[Any] = [metadata, entry, entry.properties, rng.choice(entry.chunks), _place(rng, metadata, key)]
    chosen = rng.choice(objects)
    field = rng.choice(sorted(vars(chosen)))
    new = rng.choice((*VALUES[:20], torch.float8_e4m3fn, torch.int32))
    object.__setattr__(chosen, field, new)
    return f"{type(chosen).__name__}.{field} -> {new!r}"


def _lose_field(rng: random.Random, metadata: Metadata, key: str) -> str:
    entry = metadata.state_dict_metadata[key]
    chosen = rng.choice([metadata, entry, entry.properties, rng.choice(entry.chunks), _place(rng, metadata, key)])
    field = rng.choice(sorted(vars(chosen)))
    object.__delattr__(chosen, field)
    return f"{type(chosen).__name__} without {field}"


def _place(rng: random.Random, metadata: Metadata, key: str) -> Any:
    return rng.choice([place for index, place in metadata.storage_data.items() if index.fqn == key])


_EDITS = (_lose_tensor, _rename, _lose_chunk, _double_chunk, _resize, _move_chunk, _misplace, _retype, _lose_field)


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


_HOSTILE = {
    "a number": pickle.dumps(3),
    "empty": pickle.dumps({}),
    "cut short": pickle.dumps({"a": [1, 2, 3]})[:-4],
    "a call of os.system": b"cposix\nsystem\n(Vfalse\ntR.",
    "a call of eval": pickle.dumps(_Calls(eval, "1")),
    "a metadata of lists": pickle.dumps(Metadata([], [], [])),  # type: ignore[arg-type]
    "nested": b"\x80\x04" + b"]" * _DEPTH + b"a" * (_DEPTH - 1) + b".",
    "state on a class": b"cpathlib\nPurePosixPath\nN}Vname\nVx\ns\x86b.",
    "without a stop": b"\x80\x04]",
    "of a memo that is missing": b"\x80\x04h\x05.",
}
