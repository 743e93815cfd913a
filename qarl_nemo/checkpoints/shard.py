"""One output file: its tensors in one allocation, and a safetensors file whose bytes are reproducible."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qarl_nemo.checkpoints.plan import PlannedShard
from qarl_nemo.checkpoints.reader import DTYPES

_ALIGNMENT_BYTES = 64
_MAX_TENSORS_PER_WEIGHT = 3
_HEADER_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardBuffer:
    """Holds the tensors of one shard after another, in one allocation.

    Separate buffers that live as long as a shard, between short-lived temporaries, would fragment the heap, and
    resident memory would grow with the number of shards.
    """

    def __init__(self, shards: Iterable[PlannedShard]) -> None:
        """Reserve memory for the largest shard.

        Args:
            shards: every shard that the buffer will hold, one at a time.
        """
        slack = _ALIGNMENT_BYTES * _MAX_TENSORS_PER_WEIGHT
        num_bytes = max(shard.num_bytes + slack * len(shard.tensors) for shard in shards)
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        """Forget the tensors; views of them become invalid."""
        self._used = 0
        self.tensors: dict[str, Tensor] = {}

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors in, from any device."""
        for name, tensor in tensors.items():
            space = self._bytes[self._used : self._used + tensor.nbytes]
            self.tensors[name] = space.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._used += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def save_shard(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> str:
    """Write a safetensors file, with the same bytes for the same content, and flush it to the disk.

    Written here because the safetensors package would copy every tensor first.

    Args:
        tensors: name -> contiguous CPU tensor.
        path: the file.
        metadata: text for the header.

    Returns:
        CRC-32 of the file as `files.checksum` computes it, but taken from memory, so that it also finds what the disk
        damages. No other checksum in Python's library is faster than disks are.
    """
    # Wide elements first: each tensor then begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT)
    crc32 = 0
    parts = (memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for _, tensor in ordered)
    with path.open("wb") as file:
        for part in (len(text).to_bytes(_HEADER_ALIGNMENT, "little") + text, *parts):
            file.write(part)
            crc32 = zlib.crc32(part, crc32)
        file.flush()
        os.fsync(file.fileno())
    return f"{crc32:08x}"


def shard_names(path: Path) -> list[str]:
    """Return the names of the tensors in a file that `save_shard` wrote, sorted."""
    with safe_open(path, framework="pt") as handle:
        return sorted(handle.keys())
