"""Read `torch_dist` checkpoints (torch.distributed.checkpoint's files) with plain torch, one chunk at a time."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qarl_nemo.checkpoints.hints import lfs_hint
from qarl_nemo.checkpoints.iterations import METADATA_FILE
from qarl_nemo.checkpoints.stored_tensor import StoredTensor


@dataclass(frozen=True, slots=True)
class TorchDist:
    """A checkpoint folder whose table of contents was read.

    Attributes:
        folder: where it is.
        tensors: every tensor that was asked for, by key.
    """

    folder: Path
    tensors: dict[str, StoredTensor]

    def problems(self, keys: Iterable[str]) -> list[str]:
        """Say why tensors cannot be read: chunks are missing, overlap or are outside their files."""
        tensors = [self.tensors[key] for key in keys]
        named = sorted({chunk.file for tensor in tensors for chunk in tensor.chunks if chunk.file})
        outside = [file for file in named if Path(file).name != file]
        missing = [file for file in named if file not in outside and not (self.folder / file).is_file()]
        problems = [f"{METADATA_FILE} points outside the checkpoint folder: {', '.join(outside)}"] if outside else []
        problems += [f"missing files {', '.join(missing)}"] if missing else []
        pointers = {file: hint for file in named if file not in outside and (hint := lfs_hint(self.folder / file))}
        problems += [f"{file} {hint}" for file, hint in pointers.items()]
        absent = {*outside, *missing, *pointers}
        sizes = {file: (self.folder / file).stat().st_size for file in named if file not in absent}
        ends: dict[str, int] = defaultdict(int)
        for tensor in tensors:
            problems += tensor.problems()
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends[chunk.file], chunk.position + chunk.num_bytes)
        return problems + [
            f"{file} is truncated: it has {size} bytes, and {METADATA_FILE} points at byte {ends[file]}"
            for file, size in sizes.items()
            if ends[file] > size
        ]
