"""A tensor of a `torch_dist` checkpoint: the boxes that ranks wrote, and a check that they make up the whole."""

import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import torch

# Chunks whose edges cut a tensor into more cells than this were not written by ranks.
_MAX_CELLS = 10**7


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a stored tensor, and the bytes of a file that hold it.

    Attributes:
        offsets: where it begins, one index for each dimension.
        sizes: how large it is.
        file: file name inside the checkpoint folder; empty when the table of contents names none.
        position: first byte.
        num_bytes: length of what `torch.save` wrote.
        transforms: what torch did to the bytes, e.g. compress them.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    num_bytes: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint, in the chunks that ranks wrote.

    Attributes:
        key: its name in the checkpoint.
        shape: global sizes.
        dtype: the dtype of every chunk.
        chunks: its parts, each with as many dimensions as the whole.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def chunks_by_index(self, depth: int) -> dict[tuple[int, ...], list[Chunk]]:
        """Return, for every index of so many leading dimensions, the chunks that hold part of it."""
        found: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in self.chunks:
            spans = (range(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            for index in product(*[span for _, span in zip(range(depth), spans, strict=False)]):
                found[index].append(chunk)
        return found

    def problems(self) -> list[str]:
        """Say why the chunks do not form the tensor: some are missing, overlap, are outside or have too few bytes."""
        problems = []
        lost = [list(chunk.offsets) for chunk in self.chunks if not chunk.file]
        if lost:
            problems.append(f"{self.key}: .metadata has no place for the chunks at {lost}")
        transforms = sorted({name for chunk in self.chunks for name in chunk.transforms})
        if transforms:
            problems.append(f"{self.key}: chunks are stored through {', '.join(transforms)}; save without extensions")
        short = [chunk for chunk in self.chunks if chunk.file and chunk.num_bytes < self._data_bytes(chunk)]
        if short:
            listed = ", ".join(f"{list(c.offsets)} ({c.num_bytes} of {self._data_bytes(c)} bytes)" for c in short)
            problems.append(f"{self.key}: .metadata gives too few bytes to the chunks at {listed}")
        return problems + self._coverage_problems()

    def _data_bytes(self, chunk: Chunk) -> int:
        return math.prod(chunk.sizes) * self.dtype.itemsize

    def _coverage_problems(self) -> list[str]:
        inside = all(
            start + size <= limit
            for chunk in self.chunks
            for start, size, limit in zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
        )
        held, wanted = sum(math.prod(chunk.sizes) for chunk in self.chunks), math.prod(self.shape)
        if inside and held == wanted and not self._overlap():
            return []
        detail = "" if inside else ", some outside of it"
        detail = ", some twice" if inside and held == wanted else detail
        return [
            f"{self.key} {list(self.shape)}: its {len(self.chunks)} chunks hold {held} of {wanted} values{detail}; a "
            "rank's part is missing"
        ]

    def _overlap(self) -> bool:
        """Say whether two chunks share a cell of the grid that the edges of all chunks make."""
        edges = [
            sorted({edge for chunk in self.chunks for edge in (chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d])})
            for d in range(len(self.shape))
        ]
        if math.prod(len(edge) for edge in edges) > max(_MAX_CELLS, 16 * len(self.chunks)):
            return True
        taken: set[tuple[int, ...]] = set()
        for chunk in self.chunks:
            spans = (
                range(bisect_left(edge, start), bisect_left(edge, start + size))
                for edge, start, size in zip(edges, chunk.offsets, chunk.sizes, strict=True)
            )
            for cell in product(*spans):
                if cell in taken:
                    return True
                taken.add(cell)
        return False
