"""Read rows of stored tensors out of the chunks that ranks wrote."""

import io
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.checkpoints.stored_tensor import Chunk, StoredTensor
from qarl_nemo.files import FileError

# A layer's q, k and v come from the same chunks; a single chunk that is larger than this is still held.
_CACHE_BYTES = 2**28


class ChunkReader:
    """Reads parts of stored tensors; holds the chunks it used last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}

    def read_rows(self, tensor: StoredTensor, index: tuple[int, ...], ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Return `cat([tensor[index][start:stop] for start, stop in ranges])`.

        Args:
            tensor: the stored tensor.
            index: position in the leading dimensions, e.g. layer and expert.
            ranges: rows of the dimension after them.

        Returns:
            The rows; a view of a chunk if one chunk holds them all.

        Raises:
            ValueError: a chunk is not what the table of contents says, or not safe to load.
        """
        depth = len(index)
        shape = (sum(stop - start for start, stop in ranges), *tensor.shape[depth + 1 :])
        if (tensor.key, depth) not in self._by_index:
            self._by_index[tensor.key, depth] = tensor.chunks_by_index(depth)
        chunks = self._by_index[tensor.key, depth][index]
        parts = [part for chunk in chunks for part in self._overlaps(tensor, chunk, index, ranges)]
        if len(parts) == 1 and parts[0][1].shape == shape:
            return parts[0][1]
        rows = torch.empty(shape, dtype=tensor.dtype)
        for place, part in parts:
            rows[place] = part
        assert sum(part.numel() for _, part in parts) == rows.numel()
        return rows

    def _overlaps(
        self, tensor: StoredTensor, chunk: Chunk, index: tuple[int, ...], ranges: Sequence[tuple[int, int]]
    ) -> list[tuple[tuple[slice, ...], Tensor]]:
        """Return where in the result the chunk's rows go, and the rows."""
        depth, overlaps, done = len(index), [], 0
        first, count = chunk.offsets[depth], chunk.sizes[depth]
        columns = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets[depth + 1 :], chunk.sizes[depth + 1 :], strict=True)
        )
        local = tuple(at - start for at, start in zip(index, chunk.offsets[:depth], strict=True))
        for start, stop in ranges:
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                place = slice(done + low - start, done + high - start)
                overlaps.append(((place, *columns), self._load(tensor, chunk)[local][low - first : high - first]))
            done += stop - start
        return overlaps

    def _load(self, tensor: StoredTensor, chunk: Chunk) -> Tensor:
        place = (chunk.file, chunk.position)
        if place not in self._held:
            self._held[place] = load_chunk(self._folder, tensor, chunk)
            while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > _CACHE_BYTES:
                self._held.popitem(last=False)
        self._held.move_to_end(place)
        return self._held[place]


def load_chunk(folder: Path, tensor: StoredTensor, chunk: Chunk) -> Tensor:
    """Read one chunk, as far as torch's weights_only allows, and compare it with its archive's checksums.

    torch writes these checksums and never checks them.

    Args:
        folder: the checkpoint's folder.
        tensor: the tensor it belongs to.
        chunk: the chunk.

    Returns:
        A CPU tensor of the chunk's sizes.

    Raises:
        FileError: its bytes are damaged, or are not a tensor.
    """
    where = f"{folder / chunk.file}: {tensor.key} at {list(chunk.offsets)} (byte {chunk.position})"
    try:
        with (folder / chunk.file).open("rb", buffering=0) as file:
            window = _Window(file, chunk.position, chunk.num_bytes)
            damaged = zipfile.ZipFile(window).testzip()
            window.seek(0)
            content = None if damaged else torch.load(window, map_location="cpu", weights_only=True)
    except Exception as error:
        # On damaged bytes zipfile, pickle and torch raise all kinds of exceptions.
        raise FileError(f"{where} is not a tensor that is safe to load: {error}") from error
    if damaged:
        raise FileError(
            f"{where}: {damaged} does not have its checksum, so the file is damaged (or was saved without checksums, "
            "torch.serialization.set_crc32_options); copy or save it again"
        )
    expected = (chunk.sizes, tensor.dtype)
    found = (tuple(content.shape), content.dtype) if isinstance(content, Tensor) else type(content).__name__
    if not isinstance(content, Tensor) or found != expected or content.layout != torch.strided:
        raise FileError(f"{where} is {found}, and the table of contents says {expected}")
    return content


class _Window(io.RawIOBase):
    """A range of a file's bytes, readable as a file."""

    def __init__(self, file: io.RawIOBase, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"an archive points {-at} bytes before its beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(self._size - self._at, 0)]
        self._file.seek(self._start + self._at)
        done = 0
        # The system reads at most 2 GiB at a time.
        while done < len(wanted) and (count := self._file.readinto(wanted[done:])):
            done += count
        self._at += done
        return done
