"""What one process exports of its GPU memory, opened by another: `python -m support.refit.run_shared_memory`.

Two processes of their own: PYTORCH_CUDA_ALLOC_CONF says how memory of the first is allocated, and CUDA opens a handle
only in another process than the one that made it. The line that begins with a brace has the facts as JSON.
"""

import json
import multiprocessing
import os
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.refit.ipc import Imports, export_tensors, in_one_piece, shareable

_MIB = 2**20


def main() -> None:
    """Export copies where cached blocks wait, and print where they lie and whether the other process reads the same."""
    # The allocator has a pool for less than 1 MiB, another for more, and now room in both where these have lain.
    freed = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (_MIB // 2, 64 * _MIB)]
    sources = {name: _numbers(size) for name, size in (("small", 1000), ("large", 5 * _MIB), ("copied", 3 * _MIB))}
    freed.clear()
    plain = torch.zeros(5 * _MIB, dtype=torch.uint8, device="cuda")
    facts: dict[str, Any] = {"plain_expandable": _is_expandable(plain)}
    pieces = {name: in_one_piece({name: sources[name]})[name] for name in ("small", "large")}
    pieces["copied"] = shareable(sources["copied"])
    facts["expandable"] = {name: _is_expandable(piece) for name, piece in pieces.items()}
    # More than is left of the 20 MiB in which ordinary tensors of up to 10 MiB lie.
    facts["plain_after"] = _is_expandable(torch.zeros(40 * _MIB, dtype=torch.uint8, device="cuda"))
    descriptions = export_tensors(pieces)
    torch.cuda.synchronize()
    # Engines' memory does not grow.
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(opened, (descriptions,))
    facts["same"] = {name: found[name] == bytes(source.tolist()) for name, source in sources.items()}
    print(json.dumps(facts))


def opened(descriptions: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    """Return the bytes of what another process exported."""
    imports = Imports()
    return {name: bytes(imports.import_bytes(one).tolist()) for name, one in descriptions.items()}


def _numbers(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def _is_expandable(tensor: Tensor) -> bool:
    place = tensor.data_ptr()
    [found] = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= place < segment["address"] + segment["total_size"]
    ]
    return bool(found["is_expandable"])


if __name__ == "__main__":
    main()
