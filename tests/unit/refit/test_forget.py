"""Memory that vLLM's allocator frees uncopied when an engine falls asleep; what else lies there stays."""

import pytest
import torch

from qarl_nemo.refit.forget import forget, wake_with_weights

MIB = 2**20


@pytest.mark.gpu
def test_only_memory_that_holds_nothing_but_what_refits_bring_is_forgotten():
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    allocator = cumem.CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        sizes = {
            "brought": 64 * MIB,
            "kept": 32 * MIB,
            "half_brought": 48 * MIB,
            "brought_small": 1024,
            "kept_small": 1024,
        }
        tensors = {name: torch.full((size,), 7, dtype=torch.uint8, device="cuda") for name, size in sizes.items()}
    half = tensors["half_brought"][: 24 * MIB]
    brought = [tensors["brought"], tensors["brought_small"], half]
    assert forget(brought, [tensors["kept"]]) == 64 * MIB
    # The small ones share their memory, whether `others` names the second or not.
    allocator.sleep(offload_tags=("weights",))
    copied = {pointer for pointer, data in allocator.pointer_to_data.items() if data.cpu_backup_tensor is not None}
    assert tensors["brought"].data_ptr() not in copied
    assert {tensors["kept"].data_ptr(), tensors["half_brought"].data_ptr()} <= copied
    wake_with_weights()
    allocator.wake_up(["weights"])
    tensors["brought"].fill_(8)
    del tensors["brought"]
    assert all((tensor == 7).all() for tensor in tensors.values())
    # What was forgotten once is copied as before unless it is forgotten anew.
    assert all(data.tag == "weights" for data in allocator.pointer_to_data.values())
    assert forget(brought, brought) == 0
