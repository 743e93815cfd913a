"""The refit manifest: what an update holds; all of it is verified before the first weight is replaced."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qarl_kernels import QuantFormat, get_format, narrow_tensor

# Odd multipliers make every byte's position count; 64-bit wrap-around is the modulus.
_CHUNK_WORDS = 1 << 20
_MESSAGE = {"version", "format", "published", "grid_bits", "records"}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What the manifest says about one tensor.

    Attributes:
        shape: its shape.
        dtype: its dtype, as torch prints it without the prefix (`int32`, `bfloat16`, `float8_e4m3fn`).
        checksum: `checksum_on_device` of its bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def difference(self, name: str, tensor: Tensor) -> str | None:
        """Say how a tensor's shape or dtype differs from the record, if it does; its bytes are not read."""
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        if (shape, dtype) == (self.shape, self.dtype):
            return None
        return f"{name}: got {dtype} {list(shape)}, the manifest says {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """An update's contents.

    Attributes:
        version: weight version the tensors come from.
        format: name of the format that the engine serves.
        records: one record for each tensor name.
        published: name of the format that the tensors are in; None: of `format`, and nothing is narrowed.
        grid_bits: bits of the grid that an engine rounds codes of `published` to.
    """

    version: int
    format: str
    records: dict[str, TensorRecord]
    published: str | None = None
    grid_bits: int = 0

    @classmethod
    def of(
        cls,
        layers: Iterable[Mapping[str, Tensor]],
        *,
        version: int,
        fmt: str,
        published: str | None = None,
        grid_bits: int = 0,
    ) -> "Manifest":
        """Describe the tensors of these layers; those of a stream are not kept."""
        layouts: dict[str, tuple[tuple[int, ...], str]] = {}
        sums = []
        for layer in layers:
            for name, tensor in layer.items():
                layouts[name] = tuple(tensor.shape), dtype_name(tensor.dtype)
                sums.append(checksum_on_device(tensor))
        values = zip(layouts.items(), read_checksums(sums), strict=True)
        records = {name: TensorRecord(*layout, value) for (name, layout), value in values}
        return cls(version, fmt, records, published, grid_bits)

    @property
    def nested(self) -> QuantFormat | None:
        """The engine's format, nested in the published one; None where tensors are served as they arrive.

        Raises:
            ValueError: there are no such formats, or no such grid.
        """
        if self.published is None:
            return None
        fmt = get_format(self.format, nested_in=self.published)
        if not 2 <= self.grid_bits <= fmt.num_bits:
            raise ValueError(f"grid_bits={self.grid_bits}: codes of {self.format} have 2 to {fmt.num_bits} bits")
        return replace(fmt, grid_bits=self.grid_bits)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(record.num_bytes for record in self.records.values())

    def to_message(self) -> dict[str, Any]:
        """Return the manifest as what JSON and msgpack can hold."""
        records = {name: [list(r.shape), r.dtype, r.checksum] for name, r in self.records.items()}
        return {
            "version": self.version,
            "format": self.format,
            "published": self.published,
            "grid_bits": self.grid_bits,
            "records": records,
        }

    @classmethod
    def from_message(cls, message: Any) -> "Manifest":
        """Return the manifest that `to_message` wrote.

        Raises:
            ValueError: the message is not a manifest; names the first place where it differs.
        """
        if not isinstance(message, Mapping) or not message.keys() >= _MESSAGE:
            raise ValueError(f"a manifest holds {', '.join(sorted(_MESSAGE))}; this message does not")
        if not isinstance(message["format"], str) or not isinstance(message["records"], Mapping):
            raise ValueError("a manifest's format is a name and its records are named; this message's are not")
        records = {name: _record(name, record) for name, record in message["records"].items()}
        published, grid_bits = message["published"], message["grid_bits"]
        if not isinstance(published, str | None) or type(grid_bits) is not int:
            raise ValueError("a manifest's published format is a name or null and grid_bits a number; these are not")
        manifest = cls(message["version"], message["format"], records, published, grid_bits)
        # Reject an impossible nesting here, not where it is first used.
        _ = manifest.nested
        return manifest

    def layout_problems(self, expected: "Layout") -> list[str]:
        """Compare the manifest with what the rollout engine holds.

        Args:
            expected: name -> (shape, dtype) of every tensor the engine takes.

        Returns:
            One sentence for each missing, unknown or differently laid out tensor.
        """
        nested = self.nested
        if nested:
            expected = {
                name: (_published_shape(name, shape, nested), dtype) for name, (shape, dtype) in expected.items()
            }
        found = [f"the update lacks {name}, which this engine needs" for name in expected if name not in self.records]
        for name, record in self.records.items():
            if name not in expected:
                found.append(f"this engine has no place for {name}")
                continue
            shape, dtype = expected[name][0], dtype_name(expected[name][1])
            if (record.shape, record.dtype) != (shape, dtype):
                takes = f"takes from {nested.published_name}" if nested else "holds"
                found.append(
                    f"{name} is {record.dtype} {list(record.shape)}, this engine {takes} {dtype} {list(shape)}"
                )
        return found

    def problem(self, name: str, tensor: Tensor) -> str | None:
        """Say how a tensor's name, shape or dtype differs from the manifest, if it does; its bytes are not read."""
        record = self.records.get(name)
        return f"not in the manifest: {name}" if record is None else record.difference(name, tensor)

    def missing(self, names: Container[str]) -> list[str]:
        """Return one sentence for each tensor of the manifest that is not among `names`."""
        return [f"missing: {name}" for name in self.records if name not in names]


def _published_shape(name: str, shape: tuple[int, ...], nested: QuantFormat) -> tuple[int, ...]:
    """Return the shape of a published tensor that narrows to one of this shape: packed codes have more words."""
    if not name.endswith(".weight_packed"):
        return shape
    return (*shape[:-1], shape[-1] * nested.code_bits // nested.num_bits)


def narrowed(name: str, tensor: Tensor, nested: QuantFormat | None) -> Tensor:
    """Return a published tensor as the engine holds it: codes and scales of a finer grid are rounded.

    Args:
        name: published name.
        tensor: the whole tensor.
        nested: `Manifest.nested`.

    Returns:
        The tensor itself where nothing is rounded.
    """
    suffix = name.rpartition(".")[2]
    if nested is None or suffix not in ("weight_packed", "weight_scale"):
        return tensor
    return narrow_tensor(suffix, tensor, nested)


Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def version_problems(version: Any, serving: int | None) -> list[str]:
    """Say why an engine does not take an update of this version: versions are whole numbers, and they only grow.

    Args:
        version: the update's version.
        serving: the version that is served, or was served last; None before the first refit.
    """
    if type(version) is not int or version < 0:
        return [f"its version is {version!r}; versions are whole numbers from 0 on"]
    if serving is not None and version <= serving:
        return [f"version {version} is not newer than version {serving}, which this engine has; publish a later one"]
    return []


def require_no_problems(problems: Sequence[str], outcome: str) -> None:
    """Raise one error that lists every reason against an update.

    Raises:
        ValueError: there are problems.
    """
    if problems:
        raise ValueError(f"{outcome}; {len(problems)} problem(s):\n  " + "\n  ".join(problems))


def _record(name: Any, record: Any) -> "TensorRecord":
    try:
        shape, dtype, value = record
        sizes = [*shape, value]
    except (TypeError, ValueError):
        raise ValueError(f"the manifest's record of {name!r} is no shape, dtype and checksum") from None
    known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
    if (
        not isinstance(name, str)
        or not known
        or any(type(size) is not int for size in sizes)
        or min(shape, default=0) < 0
    ):
        raise ValueError(f"the manifest's record of {name!r} is no shape, dtype and checksum: {record!r}")
    return TensorRecord(tuple(shape), dtype, value)


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return each tensor's `checksum_on_device`, waiting once for each device."""
    return read_checksums([checksum_on_device(tensor) for tensor in tensors])


def read_checksums(sums: Iterable[Tensor]) -> list[int]:
    """Return what `checksum_on_device` computed, in order, waiting once for each device."""
    sums = list(sums)
    values: dict[torch.device, Iterator[int]] = {}
    for device in {value.device for value in sums}:
        values[device] = iter(torch.stack([value for value in sums if value.device == device]).tolist())
    return [next(values[value.device]) for value in sums]


def checksum_on_device(tensor: Tensor) -> Tensor:
    """Compute sum_i (2 i + 1) * word_i modulo 2^64 over the tensor's bytes as 32-bit words, plus their number.

    Args:
        tensor: any dtype and shape.

    Returns:
        An int64 scalar on the tensor's device, without waiting for it; it differs when one word changes or two
        different words change places.
    """
    raw = bytes_of(tensor)
    aligned = raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0
    words = (raw if aligned else torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).clone()).view(torch.int32)
    if words.is_cuda:
        from qarl_kernels.ops.checksum import weighted_word_sum

        return weighted_word_sum(words) + raw.numel()
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
        weights = torch.arange(2 * start + 1, 2 * (start + chunk.numel()) + 1, 2, device=raw.device)
        total += (chunk * weights).sum()
    return total


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes [num_bytes] uint8: a view when it is contiguous, else a copy."""
    tensor = tensor.detach().contiguous()
    # A one-element tensor is contiguous at any stride; viewing it as bytes needs stride 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype as torch prints it, without the prefix."""
    return str(dtype).removeprefix("torch.")
