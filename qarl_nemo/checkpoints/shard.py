"""One output file: its tensors in one allocation, and a safetensors file whose bytes are reproducible."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from qarl_nemo.checkpoints.plan import PlannedShard

_ALIGNMENT_BYTES = 64
_MAX_TENSORS_PER_WEIGHT = 3


class ShardBuffer:
    """Holds the tensors of one shard after another.

    They share one allocation because buffers that live as long as a shard, between short-lived temporaries, fragment
    the heap, and resident memory would then grow with the number of shards.
    """

    def __init__(self, shards: Iterable[PlannedShard]) -> None:
        """Reserve memory for the largest shard.

        Args:
            shards: every shard the buffer is to hold, one at a time.
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
        """Copy tensors in.

        Args:
            tensors: output name -> tensor on any device.
        """
        for name, tensor in tensors.items():
            space = self._bytes[self._used : self._used + tensor.nbytes]
            self.tensors[name] = space.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._used += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def save_shard(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, the same bytes for the same content, and flush it to the disk.

    Args:
        tensors: name -> contiguous CPU tensor.
        path: the file.
        metadata: text for the header.
    """
    save_file(tensors, path, metadata=metadata)
    with path.open("r+b") as file:
        # safetensors writes the metadata in random order.
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(metadata.items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size
        file.seek(8)
        file.write(text.ljust(size))
        file.flush()
        os.fsync(file.fileno())
