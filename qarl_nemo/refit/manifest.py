"""The refit manifest: what an update holds, verified whole before one weight is replaced."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Odd multipliers make every byte's position count; 64-bit wrap-around is the modulus.
_CHUNK_WORDS = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What the manifest says about one tensor.

    Attributes:
        shape: its shape.
        dtype: its dtype, as torch prints it without the prefix (`int32`, `bfloat16`, `float8_e4m3fn`).
        checksum: `checksum` of its bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """An update's contents.

    Attributes:
        version: weight version the tensors come from.
        format: name of the quantized weights' format.
        records: one record for each tensor name.
    """

    version: int
    format: str
    records: dict[str, TensorRecord]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], *, version: int, fmt: str) -> "Manifest":
        """Describe `tensors`."""
        return cls(version, fmt, {name: _record(tensor) for name, tensor in tensors.items()})

    def problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Compare what arrived with the manifest.

        Args:
            tensors: what arrived.

        Returns:
            One sentence for each missing, unexpected or different tensor; empty when the update is whole.
        """
        found = [f"missing: {name}" for name in self.records if name not in tensors]
        found += [f"not in the manifest: {name}" for name in tensors if name not in self.records]
        for name, expected in self.records.items():
            if name not in tensors:
                continue
            tensor = tensors[name]
            shape, dtype = tuple(tensor.shape), _dtype_name(tensor)
            if (shape, dtype) != (expected.shape, expected.dtype):
                found.append(
                    f"{name}: got {dtype} {list(shape)}, the manifest says {expected.dtype} {list(expected.shape)}"
                )
            elif checksum(tensor) != expected.checksum:
                found.append(f"{name}: its bytes differ from the manifest's checksum")
        return found


Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def layout_problems(tensors: Mapping[str, Tensor], expected: Layout) -> list[str]:
    """Compare what arrived with what the rollout engine holds.

    Args:
        tensors: what arrived.
        expected: name -> (shape, dtype) of every tensor the engine takes.

    Returns:
        One sentence for each missing, unknown or differently laid out tensor.
    """
    found = [f"the update lacks {name}, which this engine needs" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            found.append(f"this engine has no place for {name}")
        elif (tuple(tensor.shape), tensor.dtype) != expected[name]:
            shape, dtype = expected[name]
            found.append(
                f"{name} is {_dtype_name(tensor)} {list(tensor.shape)}, this engine holds "
                f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            )
    return found


def checksum(tensor: Tensor) -> int:
    """Return sum_i (2 i + 1) * word_i modulo 2^64 over the tensor's bytes as 32-bit words, on the tensor's device.

    Args:
        tensor: any dtype and shape.

    Returns:
        A signed 64-bit integer; it differs when one word changes or two different words change places.
    """
    # Of one element any stride counts as contiguous, and a view as bytes takes only stride 1.
    raw = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
        weights = torch.arange(2 * start + 1, 2 * (start + chunk.numel()) + 1, 2, device=raw.device)
        total += (chunk * weights).sum()
    return int(total)


def _record(tensor: Tensor) -> TensorRecord:
    return TensorRecord(tuple(tensor.shape), _dtype_name(tensor), checksum(tensor))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
