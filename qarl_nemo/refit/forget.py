"""What an engine that falls asleep need not copy to the host, because its next refit brings it.

vLLM 0.25.1 copies all memory in which it loaded the model (`device_allocator/cumem.py`), which takes as much pinned
memory of the host, and time to copy it out and back.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

# vLLM's tag of memory that it copies when it falls asleep and wakes up with the weights; any other is freed uncopied.
_COPIED, _FORGOTTEN = "weights", "qarl_forgotten"


def forget(brought: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Let vLLM free memory without a copy when it falls asleep next, where that holds nothing but what refits bring.

    Args:
        brought: tensors that every refit writes, from end to end.
        others: the model's other tensors. Memory in which any other tensor lies is copied, whether it is named or not.

    Returns:
        Bytes that will not be copied; 0 if vLLM was not started so that it can sleep.
    """
    allocator = _allocator()
    if allocator is None or _COPIED not in allocator.allocator_and_pools:
        return 0
    free = {_start(tensor) for tensor in brought if tensor.untyped_storage().nbytes() == tensor.nbytes}
    free -= {_start(tensor) for tensor in others}
    forgotten = 0
    pool, _ = allocator.allocator_and_pools[_COPIED]
    for segment in pool.snapshot():
        data = allocator.pointer_to_data.get(segment["address"])
        held = {block["address"] for block in segment["blocks"] if block["state"] != "inactive"}
        if data is not None and held and held <= free:
            data.tag = _FORGOTTEN
            forgotten += segment["total_size"]
    return forgotten


def wake_with_weights() -> None:
    """Let forgotten memory come back with the weights, its contents undefined; to be called while vLLM sleeps."""
    allocator = _allocator()
    for data in allocator.pointer_to_data.values() if allocator is not None else ():
        if data.tag == _FORGOTTEN:
            data.tag = _COPIED


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
