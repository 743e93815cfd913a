"""Read `torch_dist` checkpoints (torch.distributed.checkpoint's files) with plain torch, one chunk at a time."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from qarl_nemo.checkpoints.restricted_pickle import load_metadata

METADATA_FILE = ".metadata"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a stored tensor, and the bytes of a file that hold it.

    Attributes:
        offsets: where it begins, one index for each dimension.
        sizes: how large it is.
        file: file name inside the checkpoint folder; empty when the table of contents names none.
        position: first byte.
        num_bytes: how many bytes; a tensor as `torch.save` writes it.
        transforms: what torch did to the bytes, e.g. compressed them.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    num_bytes: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint, in as many chunks as ranks wrote.

    Attributes:
        key: its name in the checkpoint.
        shape: global sizes.
        dtype: of every chunk.
        chunks: its parts.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def chunks_by_index(self, depth: int) -> dict[tuple[int, ...], list[Chunk]]:
        """Return for every index of the first dimensions the chunks that hold some of it.

        Args:
            depth: how many dimensions.

        Returns:
            Index -> chunks.
        """
        found: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in self.chunks:
            spans = (range(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            for index in product(*[span for _, span in zip(range(depth), spans, strict=False)]):
                found[index].append(chunk)
        return found


@dataclass(frozen=True, slots=True)
class TorchDist:
    """A checkpoint folder whose table of contents was read.

    Attributes:
        folder: where it lies.
        tensors: every tensor that was asked for, by key.
    """

    folder: Path
    tensors: dict[str, StoredTensor]

    def problems(self, keys: Iterable[str]) -> list[str]:
        """Say why tensors cannot be read: chunks that are missing, overlap or lie outside of their files.

        Args:
            keys: which tensors.

        Returns:
            One sentence for each problem.
        """
        tensors = [self.tensors[key] for key in keys]
        named = sorted({chunk.file for tensor in tensors for chunk in tensor.chunks if chunk.file})
        outside = [file for file in named if Path(file).name != file]
        missing = [file for file in named if file not in outside and not (self.folder / file).is_file()]
        problems = [f"{METADATA_FILE} points outside the checkpoint folder: {', '.join(outside)}"] if outside else []
        problems += [f"missing files {', '.join(missing)}"] if missing else []
        sizes = {file: (self.folder / file).stat().st_size for file in named if file not in {*outside, *missing}}
        ends: dict[str, int] = defaultdict(int)
        for tensor in tensors:
            problems += _coverage_problems(tensor)
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends[chunk.file], chunk.position + chunk.num_bytes)
        return problems + [
            f"{file} is truncated: it has {size} bytes, and {METADATA_FILE} points at byte {ends[file]}"
            for file, size in sizes.items()
            if ends[file] > size
        ]


def open_torch_dist(folder: Path, wanted: Callable[[str], bool]) -> TorchDist:
    """Read the table of contents of a `torch_dist` checkpoint; pickled objects in it are never loaded.

    Args:
        folder: the folder with `.metadata`.
        wanted: says which keys matter.

    Returns:
        The wanted tensors.

    Raises:
        ValueError: the table of contents is missing, unreadable or not to be trusted.
    """
    if not (folder / METADATA_FILE).is_file():
        raise ValueError(f"{folder} has no {METADATA_FILE}, so it is no torch_dist checkpoint")
    metadata = load_metadata(folder / METADATA_FILE)
    stored = {
        key: _stored_tensor(key, entry, metadata)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and wanted(key)
    }
    return TorchDist(folder, stored)


def _stored_tensor(key: str, entry: TensorStorageMetadata, metadata: Metadata) -> StoredTensor:
    chunks = []
    for chunk in entry.chunks:
        place = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        where = (place.relative_path, place.offset, place.length) if place else ("", 0, 0)
        # Files of older versions of torch lack the field.
        transforms = tuple(getattr(place, "transform_descriptors", None) or ())
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *where, transforms))
    return StoredTensor(key, tuple(entry.size), entry.properties.dtype, tuple(chunks))


def _coverage_problems(tensor: StoredTensor) -> list[str]:
    problems = []
    lost = [list(chunk.offsets) for chunk in tensor.chunks if not chunk.file]
    if lost:
        problems.append(f"{tensor.key}: {METADATA_FILE} has no place for the chunks at {lost}")
    transforms = sorted({name for chunk in tensor.chunks for name in chunk.transforms})
    if transforms:
        problems.append(f"{tensor.key}: chunks are stored through {', '.join(transforms)}; save without extensions")
    inside = all(
        start >= 0 and start + size <= limit
        for chunk in tensor.chunks
        for start, size, limit in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
    )
    held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    distinct = len({chunk.offsets for chunk in tensor.chunks}) == len(tensor.chunks)
    if not inside or not distinct or held != math.prod(tensor.shape):
        problems.append(
            f"{tensor.key} {list(tensor.shape)}: its {len(tensor.chunks)} chunks hold {held} of "
            f"{math.prod(tensor.shape)} values{'' if inside else ', some outside of it'}; a rank's part is missing"
        )
    return problems
