"""CUDA IPC without pickle: describes GPU memory to another process by numbers and bytes."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from qarl_nemo.refit.manifest import bytes_of


def export_tensor(tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor's memory for exactly one other process.

    Args:
        tensor: a contiguous tensor on a GPU; it must exist until the other process has read it.

    Returns:
        A description for `import_bytes`, in types that msgpack and, except for bytes, JSON can hold.

    Source: torch 2.11, `torch/multiprocessing/reductions.py`.
    """
    raw = bytes_of(tensor)
    _, arguments = reduce_tensor(raw)
    _, size, _, offset, _, _, _, handle, size_bytes, offset_bytes, _, counter, counter_offset, event, sync = arguments
    return {
        "gpu": gpu_id(raw.device.index),
        "num_bytes": size[0],
        "offset": offset,
        "storage": [handle, size_bytes, offset_bytes],
        "counter": [counter, counter_offset],
        "event": [event, sync],
    }


def import_bytes(description: dict[str, Any]) -> Tensor:
    """Return another process's memory as a tensor [num_bytes] uint8 on its own GPU.

    Args:
        description: what `export_tensor` returned.

    Returns:
        A view; it must be released before the other process changes the memory.

    Raises:
        RuntimeError: this process does not see that GPU.
    """
    visible = {gpu_id(index): index for index in range(torch.cuda.device_count())}
    if description["gpu"] not in visible:
        raise RuntimeError(
            f"the learner's tensors are on GPU {description['gpu']}, this engine rank sees only "
            f"{', '.join(visible)}; use CollectiveSender, or let the engine see that GPU"
        )
    storage, size_bytes, offset_bytes = description["storage"]
    counter, counter_offset = description["counter"]
    event, sync = description["event"]
    return rebuild_cuda_tensor(
        Tensor,
        (description["num_bytes"],),
        (1,),
        description["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        visible[description["gpu"]],
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
