"""What leaves a GPU comes back with the same bits, whatever fails in between; a CPU's own memory plays the GPU's."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qarl_nemo.megatron import offload
from qarl_nemo.megatron.offload import (
    Offload,
    leaving_bytes,
    optimizer_tensors,
    reload_for_update,
    reserve_parameters,
)
from support.asserts import assert_bitwise_equal
from support.interruptions import third_call_fails
from support.programs import run_program

PIECE = 2**12


def some_tensors(device="cpu"):
    """Several dtypes, one tensor larger than a piece, an empty one, and a NaN with a payload."""
    odd = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    odd[7] = 0x7FC12345
    tensors = [
        odd.view(torch.float32),
        torch.randn(3, 5, 7).bfloat16(),
        torch.randn(2 * PIECE + 11),
        torch.zeros(0),
        torch.arange(300, dtype=torch.int16).reshape(20, 15),
        torch.randn(33),
    ]
    return [tensor.to(device) for tensor in tensors]


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def assert_same(tensors, expected):
    for tensor, one in zip(tensors, expected, strict=True):
        assert_bitwise_equal(tensor, one)


def held_bytes(tensors):
    return sum({memory.data_ptr(): memory.nbytes() for memory in (t.untyped_storage() for t in tensors)}.values())


def test_tensors_come_back_with_the_same_bits_and_hold_no_memory_meanwhile():
    tensors, carrier = some_tensors(), Offload(PIECE)
    expected = copies(tensors)
    carrier.start_offload(tensors)
    assert_same(tensors, expected)
    carrier.finish_offload()
    assert held_bytes(tensors) == 0
    assert [tensor.shape for tensor in tensors] == [one.shape for one in expected]
    carrier.finish_reload()
    assert_same(tensors, expected)


def test_each_cycle_carries_the_newest_values_through_the_same_host_memory():
    tensors, carrier = some_tensors(), Offload(PIECE)
    addresses = []
    for _ in range(4):
        carrier.start_offload(tensors)
        carrier.finish_offload()
        addresses.append([memory.data_ptr() for memory in carrier._host])
        carrier.start_reload()
        carrier.finish_reload()
        tensors[2].add_(1)
        tensors[4].mul_(3)
        expected = copies(tensors)
    assert_same(tensors, expected)
    assert all(one == addresses[0] for one in addresses)
    # The large tensor takes nine pieces of memory, so blocks are of a piece at most, and less than twice the bytes.
    assert max(memory.numel() for memory in carrier._host) == PIECE
    assert carrier.pageable_bytes < 2 * sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("num_bytes", [0, 1, 2**20, 2**20 + 512, 200 * 10**6, 2**28 - 512, 10**9 + 1])
def test_a_piece_pins_hardly_more_than_it_has(num_bytes):
    sizes = offload._block_sizes(num_bytes, offload.PIECE_BYTES)
    assert sum(sizes) == num_bytes
    assert max(sizes, default=0) <= offload.PIECE_BYTES
    assert sum(map(offload._rounded, sizes)) - num_bytes < 2**20
    # As one block, which is what PyTorch makes of it, a piece of an MLP's matrices would take a third more.
    assert offload._rounded(200 * 10**6) > 1.3 * 200 * 10**6


def test_another_packing_frees_the_blocks_that_it_does_not_use():
    carrier = Offload(2**22)
    for sizes in ([3 * 2**20] * 4, [5 * 2**20] * 2):
        tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
        expected = copies(tensors)
        carrier.start_offload(tensors)
        carrier.finish_offload()
        assert carrier.pageable_bytes == sum(sizes)
        carrier.finish_reload()
        assert_same(tensors, expected)


def test_gathered_tensors_keep_their_bits_and_may_leave_from_where_they_are():
    tensors, carrier = some_tensors(), Offload(PIECE)
    expected = copies(tensors)
    for _ in range(2):
        carrier.gather(tensors, 2**20)
        assert_same(tensors, expected)
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert len(places) == 1
    carrier.start_offload(tensors)
    # Nothing is gathered that is on its way.
    carrier.gather(tensors, 2**4)
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == places
    carrier.finish_offload()
    carrier.gather(tensors, 2**4)
    assert held_bytes(tensors) == 0
    # Blocks of the host are as large as ever.
    assert max(memory.numel() for memory in carrier._host) == PIECE
    carrier.finish_reload()
    assert_same(tensors, expected)


def test_tensors_that_join_later_leave_with_the_others():
    tensors, carrier = some_tensors(), Offload(PIECE)
    carrier.start_offload(tensors[:2])
    carrier.finish_offload()
    carrier.finish_reload()
    tensors[0].zero_()
    expected = copies(tensors)
    carrier.start_offload(tensors)
    carrier.finish_offload()
    assert held_bytes(tensors) == 0
    carrier.finish_reload()
    assert_same(tensors, expected)


def test_repeated_and_needless_calls_change_nothing():
    tensors, carrier = some_tensors(), Offload(PIECE)
    expected = copies(tensors)
    carrier.finish_offload()
    carrier.finish_reload()
    carrier.start_offload([])
    for _ in range(2):
        carrier.start_offload(tensors)
    for _ in range(2):
        carrier.finish_offload()
    carrier.start_offload(tensors)
    for _ in range(2):
        carrier.start_reload()
    carrier.start_offload(tensors)
    carrier.finish_offload()
    assert held_bytes(tensors) == 0
    for _ in range(2):
        carrier.finish_reload()
    assert_same(tensors, expected)


def test_tensors_that_are_wanted_before_they_left_just_stay():
    tensors, carrier = some_tensors(), Offload(PIECE)
    carrier.start_offload(tensors)
    carrier.start_reload()
    tensors[2].add_(1)
    expected = copies(tensors)
    carrier.finish_offload()
    carrier.finish_reload()
    assert_same(tensors, expected)


def test_a_host_without_memory_leaves_everything_where_it_is(monkeypatch):
    tensors, carrier = some_tensors(), Offload(PIECE)
    expected = copies(tensors)
    full = third_call_fails(offload._host_memory, MemoryError("the host is full"))
    monkeypatch.setattr(offload, "_host_memory", full)
    with pytest.raises(MemoryError, match="the host is full"):
        carrier.start_offload(tensors)
    carrier.finish_offload()
    assert_same(tensors, expected)
    carrier.start_offload(tensors)
    carrier.finish_offload()
    assert held_bytes(tensors) == 0
    carrier.finish_reload()
    assert_same(tensors, expected)


class Buffer:
    """Megatron's buffer of parameters: its memory, and Megatron's own ways out and back."""

    def __init__(self, param_data):
        self.param_data, self.param_data_cpu, self.grad_data = param_data, None, None

    def cycle(self):
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer as Own

        Own.offload_to_cpu(self)
        held = leaving_bytes(SimpleNamespace(buffers=[self], expert_parallel_buffers=[]))
        Own.reload_from_cpu(self)
        return held


def test_parameters_leave_to_memory_that_is_reserved_once():
    pytest.importorskip("megatron.core.distributed.param_and_grad_buffer")
    dense, experts = (Buffer(torch.randn(count).bfloat16()) for count in (1000, 4096))
    # An optimizer that is not distributed has no buffer of parameters.
    model = SimpleNamespace(buffers=[dense, Buffer(None)], expert_parallel_buffers=[experts])
    assert leaving_bytes(model) == 2 * (1000 + 4096)
    for change in range(2):
        dense.param_data.add_(change)
        expected = copies([dense.param_data, experts.param_data])
        reserve_parameters(model)
        places = [buffer.param_data_cpu.data_ptr() for buffer in (dense, experts)]
        assert [dense.cycle(), experts.cycle()] == [0, 0]
        assert_same([dense.param_data, experts.param_data], expected)
        assert [buffer.param_data_cpu.data_ptr() for buffer in (dense, experts)] == places


def test_a_gpu_without_memory_can_be_asked_again(monkeypatch):
    tensors, carrier = some_tensors(), Offload(PIECE)
    expected = copies(tensors)
    carrier.start_offload(tensors)
    carrier.finish_offload()
    full = third_call_fails(torch.UntypedStorage.resize_, torch.OutOfMemoryError("the GPU is full"))
    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(torch.OutOfMemoryError, match="the GPU is full"):
        carrier.finish_reload()
    assert held_bytes(tensors) == 0
    carrier.finish_reload()
    assert_same(tensors, expected)


def trained(offloads):
    """The weights after three steps of Adam on FP32 masters, whose tensors are away between steps if `offloads`."""
    torch.manual_seed(3)
    model = nn.Linear(40, 50).bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer, carrier = torch.optim.Adam(masters, lr=0.1), Offload(PIECE)
    carried = []
    if offloads:
        reload_for_update(optimizer, carrier)
    for _ in range(3):
        if offloads:
            tensors = optimizer_tensors(optimizer, model)
            carrier.start_offload(tensors)
            carrier.finish_offload()
            carried.append(len(tensors))
            assert held_bytes(tensors) == 0
        optimizer.zero_grad()
        model.zero_grad()
        model(torch.randn(4, 40).bfloat16()).square().sum().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return list(model.parameters()), carried


def test_training_goes_on_as_if_nothing_had_left():
    (weights, carried), (expected, _) = trained(offloads=True), trained(offloads=False)
    assert_same(weights, expected)
    # The weight's master, later its two moments as well; the bias's are 200 bytes and stay, and so do step counts.
    assert carried == [1, 3, 3]


def test_what_an_optimizer_shares_with_its_model_never_leaves():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD([parameter.detach().view(-1) for parameter in model.parameters()], lr=1.0)
    assert optimizer_tensors(optimizer, model) == []


@pytest.mark.slow
def test_megatrons_optimizers_train_as_if_nothing_had_left(tmp_path):
    pytest.importorskip("megatron", reason="needs megatron-core")
    run_program("megatron.run_offload", tmp_path)
    facts = json.loads((tmp_path / "facts.json").read_text())
    # The weight's master, later its two moments as well.
    kinds = [f"{kind} {moves}" for kind in ("whole", "distributed") for moves in ("leaves", "gathers")]
    assert facts == {kind: {"same": True, "carried": [1, 3, 3]} for kind in kinds}


@pytest.mark.gpu
def test_gpu_memory_is_freed_and_copies_are_fast():
    """Four GiB in tensors of 3 MiB, as one rank's share of an expert's Adam state."""
    tensors = [torch.randn(3 * 2**18, device="cuda") for _ in range(1365)]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    carrier = Offload()
    for cycle in range(3):
        with torch.no_grad():
            torch._foreach_mul_(tensors, 1.5)
        expected = [tensor.cpu() for tensor in tensors[::97]]
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        started = time.perf_counter()
        carrier.start_offload(tensors)
        returned_s = time.perf_counter() - started
        carrier.finish_offload()
        offload_s = time.perf_counter() - started
        assert allocated - torch.cuda.memory_allocated() >= num_bytes
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] >= num_bytes
        started = time.perf_counter()
        carrier.finish_reload()
        torch.cuda.synchronize()
        reload_s = time.perf_counter() - started
        assert_same([tensor.cpu() for tensor in tensors[::97]], expected)
        gb = num_bytes / 1e9
        print(
            f"cycle {cycle}: {gb:.2f} GB to the host {gb / offload_s:.1f} GB/s (started in {returned_s * 1e3:.1f} ms), "
            f"back {gb / reload_s:.1f} GB/s"
        )
    assert carrier.pageable_bytes == 0
    started = time.perf_counter()
    pageable = [tensor.to("cpu") for tensor in tensors]
    print(f"pageable, as NeMo-RL carries it: {gb / (time.perf_counter() - started):.1f} GB/s")
    assert_same(pageable[::97], expected)
    # The first cycle pins memory; after it copies must be far from pageable speed.
    assert gb / offload_s > 8
    assert gb / reload_s > 8


@pytest.mark.gpu
def test_copies_see_what_was_queued_before_them_and_are_seen_by_what_comes_after():
    tensors, carrier = [torch.randn(2**26, device="cuda")], Offload()
    factor = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        # The value is late: the GPU is still busy with the products when the copy is asked for.
        for _ in range(8):
            factor = (factor @ factor).clamp_(-1, 1)
        tensors[0].add_(factor[0, 0] + 2)
        expected = tensors[0].clone()
        carrier.start_offload(tensors)
        carrier.finish_offload()
        carrier.finish_reload()
        # Queued at once, while the copy is still under way.
        assert_bitwise_equal(tensors[0].clone(), expected)


@pytest.mark.gpu
def test_a_full_gpu_keeps_the_host_copy():
    tensors, carrier = [*some_tensors("cuda"), torch.randn(2**28, device="cuda")], Offload()
    expected = [tensor.cpu() for tensor in tensors]
    carrier.start_offload(tensors)
    carrier.finish_offload()
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 2**28, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        carrier.finish_reload()
    del hog
    carrier.finish_reload()
    assert_same([tensor.cpu() for tensor in tensors], expected)
