"""CUDA IPC without pickle: describes GPU memory to another process by numbers and bytes."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from qarl_nemo.refit.manifest import bytes_of

# What CUDA's own allocations are aligned to, so that kernels read a part of one as they would read it alone.
_ALIGNMENT = 256


def memory_grows() -> bool:
    """Return whether this process's GPU memory lies in expandable segments, which CUDA IPC cannot export.

    Source: torch 2.11, `c10/core/AllocatorConfig.h`.
    """
    # torch 2.11 has no other answer that does not list every block of memory.
    values = re.findall(r"expandable_segments\s*:\s*(\w+)", _allocator_settings())
    return values[-1:] == ["True"] and torch.cuda.is_available()


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Make CUDA allocations ordinary ones, which CUDA IPC can export, until the context is left.

    Source: torch 2.11, `c10/cuda/CUDACachingAllocator.cpp`, `get_free_block`.
    """
    if not memory_grows():
        yield
        return
    settings = _allocator_settings()
    # Meanwhile the allocator passes over cached blocks of expandable segments, too, so that no pool of its own is
    # needed. What a call does not repeat of the other settings may fall back to its default.
    torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    # torch reads the second variable only where the first is not set, not even to nothing.
    value = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    return value.strip(", ")


def shareable(tensor: Tensor) -> Tensor:
    """Return a tensor, contiguous and without a graph, where CUDA IPC can export it: a copy if memory grows."""
    if not memory_grows():
        return tensor.detach().contiguous()
    with shareable_memory():
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def in_one_piece(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors into one allocation that CUDA IPC can export, for another process opens allocations one by one.

    Args:
        tensors: tensors by name, all on one device.

    Returns:
        The same, contiguous, one behind the other in one storage.
    """
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    device = next((tensor.device for tensor in tensors.values()), None)
    with shareable_memory():
        piece = torch.empty(end, dtype=torch.uint8, device=device)
    found = {}
    for name, tensor in tensors.items():
        part = piece[places[name] : places[name] + tensor.nbytes]
        found[name] = part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return found


def export_tensors(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Describe tensors' memory for exactly one other process; each storage is exported once.

    Args:
        tensors: contiguous tensors on a GPU by name, from `shareable` or `in_one_piece` if memory may grow; they must
            exist until the other process has read them.

    Returns:
        A description for `import_bytes` by name, in types that msgpack and, except for bytes, JSON can hold.

    Source: torch 2.11, `torch/multiprocessing/reductions.py`.
    """
    pieces: dict[int, dict[str, Any]] = {}
    found = {}
    for name, tensor in tensors.items():
        raw = bytes_of(tensor)
        storage = raw.untyped_storage()
        if storage.data_ptr() not in pieces:
            pieces[storage.data_ptr()] = _exported(raw)
        found[name] = pieces[storage.data_ptr()] | {"num_bytes": raw.numel(), "offset": raw.storage_offset()}
    return found


def _exported(raw: Tensor) -> dict[str, Any]:
    _, arguments = reduce_tensor(raw)
    _, _, _, _, _, _, _, handle, size_bytes, offset_bytes, _, counter, counter_offset, event, sync = arguments
    return {
        "gpu": gpu_id(raw.device.index),
        "storage": [handle, size_bytes, offset_bytes],
        "counter": [counter, counter_offset],
        "event": [event, sync],
    }


class Imports:
    """What one message says of another process's memory; each storage is opened once."""

    def __init__(self) -> None:
        self._gpus = {gpu_id(index): index for index in range(torch.cuda.device_count())}
        self._opened: dict[tuple[Any, ...], Tensor] = {}

    def import_bytes(self, description: Mapping[str, Any]) -> Tensor:
        """Return another process's memory as a tensor [num_bytes] uint8 on its own GPU.

        Args:
            description: one of those that `export_tensors` returned.

        Returns:
            A view; it must be released before the other process changes the memory.

        Raises:
            RuntimeError: this process does not see that GPU.
        """
        if description["gpu"] not in self._gpus:
            raise RuntimeError(
                f"the learner's tensors are on GPU {description['gpu']}, this engine rank sees only "
                f"{', '.join(self._gpus)}; use CollectiveSender, or let the engine see that GPU"
            )
        key = (description["gpu"], *description["storage"], *description["counter"])
        if key not in self._opened:
            self._opened[key] = self._open(description)
        return self._opened[key][description["offset"] :][: description["num_bytes"]]

    def _open(self, description: Mapping[str, Any]) -> Tensor:
        storage, size_bytes, offset_bytes = description["storage"]
        counter, counter_offset = description["counter"]
        event, sync = description["event"]
        return rebuild_cuda_tensor(
            Tensor,
            (size_bytes,),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            self._gpus[description["gpu"]],
            storage,
            size_bytes,
            offset_bytes,
            False,
            counter,
            counter_offset,
            event,
            sync,
        )


def gpu_id(index: int) -> str:
    """Return a GPU's unique name on this host; indices differ between processes with other CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(index).uuid)
