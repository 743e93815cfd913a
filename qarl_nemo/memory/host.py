"""Memory of a host whose GPUs learner and engines share, computed: what sleeps there, what moved there, and the rest.

Most of it is pinned, and PyTorch rounds each block of pinned memory up to a power of two and never gives it back
(2.11, ATen/core/CachingHostAllocator.h). So a block counts whole, and for the rest of the run.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from qarl_formats import BASELINE, get_format
from qarl_nemo.memory.learner import Learner, rank_memory, rank_parameters
from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.memory.units import BF16, HOST_BYTES, PROCESS_BYTES
from qarl_nemo.parallelism import Parallelism

HOST_PARTS = ("engines", "parameters", "optimizer", "processes")
_MIB = 2**20
# How PyTorch's allocator asks for a GPU's memory (c10/core/AllocatorConfig.h), which is what a sleeping engine copies,
# block by block (vLLM 0.25.1, device_allocator/cumem.py): small tensors share blocks of 2 MiB, those of up to 10 MiB
# blocks of 20, and larger ones have one each.
_SMALL, _MEDIUM, _SHARED, _ROUNDED = _MIB, 10 * _MIB, 20 * _MIB, 2 * _MIB


def pinned_bytes(size: float) -> int:
    """Compute what a block of pinned memory takes: 2^ceil(log2(size)).

    Args:
        size: bytes that are asked for, more than 0.

    Returns:
        Bytes.
    """
    return 1 << (math.ceil(size) - 1).bit_length()


def backup_bytes(model: ModelSize, served: Learner, tp: int, ep: int = 1, *, forgets: bool = False) -> float:
    """Compute the host memory that the weights of a sleeping engine take, for each of its GPUs.

    Args:
        model: its sizes.
        served: the engine's format, group size and targets.
        tp: GPUs that share one engine's layers.
        ep: GPUs that share its experts.
        forgets: whether it copies no block that holds only what refits bring (`refit/forget.py`), which leaves those of
            the smallest tensors.

    Returns:
        Bytes, of pinned memory.
    """
    tensors = _engine_tensors(model, served, tp, ep)
    return sum(count * _backup(size) for count, size in tensors if size <= _SMALL or not forgets)


def host_memory(
    model: ModelSize,
    ranks: Parallelism,
    learner: Learner,
    served: Learner,
    *,
    gpus: int,
    engine_tp: int,
    engine_ep: int = 1,
    engines_forget: bool,
    parameters_leave: bool,
    optimizer_leaves: bool,
) -> dict[str, float]:
    """Compute the memory of one host.

    Args:
        model: its sizes.
        ranks: how GPUs share the learner.
        learner: what it holds.
        served: what engines serve.
        gpus: how many the host has; each has a learner rank and an engine or its part.
        engine_tp: GPUs that share one engine.
        engine_ep: GPUs that share its experts.
        engines_forget: whether they are refitted before they serve again, and copy little; NeMo-RL's own copy all.
        parameters_leave: whether the learner's parameters leave the GPU while engines run.
        optimizer_leaves: whether its optimizer does.

    Returns:
        Bytes of each of `HOST_PARTS`: weights of sleeping engines, Megatron's buffers of parameters and the optimizer's
        state where these leave, and `PROCESS_BYTES` a GPU with `HOST_BYTES` once.
    """
    experts, dense = rank_parameters(model, ranks)
    buffers = [BF16 * count for count in (experts, dense) if count]
    # It leaves in blocks that waste next to nothing. On the host from the start it is FP32, without gradients: Adam's,
    # or SGD's, which has one momentum as Muon has.
    offloaded = learner.optimizer == "offloaded"
    state = replace(learner, optimizer="adam" if learner.leaves_to_adam else "muon") if offloaded else learner
    optimizer = rank_memory(model, ranks, state).parts["optimizer"]
    gpu = {
        "engines": backup_bytes(model, served, engine_tp, engine_ep, forgets=engines_forget),
        "parameters": sum(map(pinned_bytes, buffers)) if parameters_leave else 0.0,
        "optimizer": optimizer if optimizer_leaves or offloaded else 0.0,
        "processes": PROCESS_BYTES,
    }
    held = {name: gpus * size for name, size in gpu.items()}
    return held | {"processes": held["processes"] + HOST_BYTES}


def _backup(size: float) -> float:
    if size <= _SMALL:
        return size
    if size < _MEDIUM:
        return size * pinned_bytes(_SHARED) / _SHARED
    return pinned_bytes(math.ceil(size / _ROUNDED) * _ROUNDED)


def _engine_tensors(model: ModelSize, served: Learner, tp: int, ep: int) -> Iterator[tuple[int, float]]:
    """Yield how many tensors of how many bytes a GPU of an engine has, as vLLM stacks them."""
    fmt = (served.record or get_format(BASELINE)).narrowed
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    block = max(model.num_experts, 1) * model.inner
    stacks = {
        "attention": (tp, (queries + 2 * keys, queries)),
        "experts" if model.num_experts else "mlp": (max(tp, ep) if model.num_experts else tp, (2 * block, block)),
    }
    for target, (gpus, sizes) in stacks.items():
        for rows in sizes:
            count = rows * model.hidden / gpus
            if target not in served.targets:
                yield model.num_layers, BF16 * count
                continue
            yield model.num_layers, fmt.code_bits / 8 * count
            yield model.num_layers, (fmt.bits_per_weight - fmt.code_bits) / 8 * count
    yield model.num_layers, BF16 * model.small_parameters
    yield 1 if model.tied_head else 2, BF16 * model.vocab_size * model.hidden / tp
