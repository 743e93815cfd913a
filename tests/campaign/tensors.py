"""Damage that knows safetensors, npz and torch.save: tensors missing, renamed, doubled, of other shapes and values."""

import io
import json
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from edits import Content
from trees import VALUES, edit_tree, places_in

_SIZES = {"BF16": 2, "F16": 2, "F32": 4}
_LIKE_BF16 = ("F16", "I16", "U16")
# BF16, little-endian: NaN, both infinities, and the largest number, which no int4 grid of BF16 scales holds.
_BAD_VALUES = {"NaN": b"\xc0\x7f", "inf": b"\x80\x7f", "-inf": b"\x80\xff", "3.39e38": b"\x7f\x7f"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def edit_safetensors(rng: random.Random, data: bytes) -> Content:
    """Damage a BF16 safetensors file: half of the time its header, else one tensor of a file that stays readable."""
    if rng.random() < 0.4:
        return _edit_header(rng, data)
    tensors = _parse(data)
    at = rng.randrange(len(tensors))
    tensor = tensors[at]
    what, changed = rng.choice(_TENSOR_EDITS)(rng, tensor)
    return f"{tensor.name} {list(tensor.shape)}: {what}", _build([*tensors[:at], *changed, *tensors[at + 1 :]])


def _dropped(_: random.Random, tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    return "dropped", []


def _renamed(rng: random.Random, tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    name = rng.choice((tensor.name + "x", tensor.name.upper(), "", tensor.name.replace(".weight", ""), "lm.weight"))
    return f"renamed to {name!r}", [replace(tensor, name=name)]


def _doubled(rng: random.Random, tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    name = rng.choice((tensor.name + ".copy", tensor.name.replace("layers.0", "layers.77"), "extra.weight"))
    return f"is there again as {name}", [tensor, replace(tensor, name=name if name != tensor.name else "again")]


def _reshaped(rng: random.Random, tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    rows, rest = tensor.shape[0], tensor.shape[1:]
    shapes = [(*tensor.shape, 1), (rows // 2, 2, *rest), (1, *tensor.shape)]
    if rest:
        shapes += [tensor.shape[::-1]] * 2 if tensor.shape[0] != tensor.shape[-1] else []
        shapes += [(rows * rest[0],), (rows // 2, rest[0] * 2)]
    shape = rng.choice(shapes)
    return f"shape {list(shape)}", [replace(tensor, shape=shape)]


def _resized(rng: random.Random, tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    rows = rng.choice((0, 0, tensor.shape[0] // 2, tensor.shape[0] - 1, tensor.shape[0] + 1, tensor.shape[0] * 2))
    width = len(tensor.data) // tensor.shape[0]
    content = (tensor.data * 2 + tensor.data)[: rows * width]
    return f"{rows} rows", [replace(tensor, shape=(rows, *tensor.shape[1:]), data=content)]


def _retyped(rng: random.Random, tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    dtype = rng.choice(_LIKE_BF16)
    return f"dtype {dtype}", [replace(tensor, dtype=dtype)]


def _bad_value(rng: random.Random, tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    name, value = rng.choice(list(_BAD_VALUES.items()))
    at = 2 * rng.randrange(len(tensor.data) // 2)
    return f"{name} at element {at // 2}", [replace(tensor, data=tensor.data[:at] + value + tensor.data[at + 2 :])]


_TENSOR_EDITS = (_dropped, _renamed, _doubled, _reshaped, _resized, _retyped, _bad_value)


def _edit_header(rng: random.Random, data: bytes) -> Content:
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        length = rng.choice((0, 1, size - 1, size + 1, 2 * size, 2**63, 2**64 - 1, 100_000_001))
        return f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    what, header = edit_tree(rng, json.loads(data[8 : 8 + size]))
    text = json.dumps(header).encode("utf-8", "replace")
    return f"header: {what}", len(text).to_bytes(8, "little") + text + data[8 + size :]


def _parse(data: bytes) -> list[_Tensor]:
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    return [
        _Tensor(name, entry["dtype"], tuple(entry["shape"]), body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _build(tensors: list[_Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + len(tensor.data)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors)


def edit_npz(rng: random.Random, data: bytes) -> Content:
    """Damage one array of an npz file."""
    arrays = dict(np.load(io.BytesIO(data)))
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    damaged: dict[str, Any] = {
        "dropped": None,
        "empty": array[:0],
        "one shorter": array[1:],
        "a matrix": np.stack([array, array]),
        "a scalar": np.float32(3.0),
        "text": array.astype(str),
        "objects": np.array([{"a": 1}] * len(array), dtype=object),
        "complex": array.astype(np.complex64),
        "not finite": np.full(array.shape, rng.choice((np.nan, np.inf, -np.inf)), np.float32),
        "huge": np.full(array.shape, 1e38, np.float32),
    }
    what = rng.choice(sorted(damaged))
    if damaged[what] is None:
        del arrays[name]
    else:
        arrays[name] = damaged[what]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return f"{name} {what}", buffer.getvalue()


def edit_torch_save(rng: random.Random, data: bytes) -> Content:
    """Damage one entry of what `torch.save` wrote."""
    content = torch.load(io.BytesIO(data), weights_only=True)
    places = list(places_in(content))
    path, holder, key = rng.choice(places)
    old = holder[key]
    if isinstance(old, torch.Tensor) and rng.random() < 0.5:
        what = rng.choice(("flat", "float64", "NaN", "empty"))
        holder[key] = {
            "flat": old.flatten()[None, None],
            "float64": old.double(),
            "NaN": torch.full_like(old, float("nan")) if old.is_floating_point() else old[None],
            "empty": old.new_empty(0, 3),
        }[what]
    elif rng.random() < 0.4:
        what = "gone"
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES[:12])
        what = repr(holder[key])
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return f"{'.'.join(map(str, path))}: {what}", buffer.getvalue()
