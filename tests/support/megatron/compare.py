"""Compares a layout's training step with the expected one, by figures and by the names of wrong tensors."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from support.megatron.whole import requantized, whole_grads

# isort: split
from megatron.core import parallel_state

from qarl_kernels import QuantFormat
from qarl_nemo.megatron.publish import publish_layers

_EXPERTS_AT_ONCE = 16


@torch.no_grad()
def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative difference of two tensors; takes a few experts at a time, on the expected tensor's device."""
    rows = _EXPERTS_AT_ONCE if actual.ndim == 3 else len(actual)
    difference, size = torch.zeros(2, dtype=torch.float64, device=actual.device)
    for one, other in zip(actual.split(rows), expected.split(rows), strict=True):
        other = other.to(one.device).float()
        difference += (one.float() - other).double().square().sum()
        size += other.double().square().sum()
    return float((difference / size).sqrt())


def same_bytes(actual: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal in dtype, shape and every byte."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (actual, expected)))


def published(model: list[nn.Module], **options: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is published, by name."""
    for layer in publish_layers(model, **options):
        yield from layer.items()


def compared_published(model: list[nn.Module], vocab_size: int, expected: dict[str, Tensor]) -> dict[str, list[str]]:
    """What is published, whole and as shards, beside what the whole model publishes."""
    missing, differing, wrong = set(expected), [], []
    for name, tensor in published(model, vocab_size=vocab_size):
        missing.discard(name)
        if name not in expected or not same_bytes(tensor, expected[name]):
            differing.append(name)
    rank = parallel_state.get_expert_model_parallel_rank()
    for name, shard in published(model, vocab_size=vocab_size, gather_experts=False):
        if "experts" in name and not same_bytes(shard, expected[name][rank * len(shard) : (rank + 1) * len(shard)]):
            wrong.append(name)
    return {"differing": [*differing, *sorted(missing)], "wrong_shards": wrong}


def compared_grads(model: list[nn.Module], expected: dict[str, Tensor]) -> dict[str, float]:
    """Errors of this stage's gradients, by Hugging Face's names."""
    return {name: relative_error(grad, expected[name]) for name, grad in whole_grads(model)}


def compared_step(
    model: list[nn.Module], vocab_size: int, fmt: QuantFormat, before: dict[str, Tensor]
) -> dict[str, list[str]]:
    """What is published after the masters changed, beside those masters quantized, and beside what it was before."""
    stepped = dict(_experts(published(model, vocab_size=vocab_size)))
    wrong, stale = [], []
    for name, tensor in requantized(model, fmt):
        if not same_bytes(stepped[name], tensor):
            wrong.append(name)
        # Scales of blocks whose largest weight did not change may stay as they were.
        if same_bytes(stepped[name], before[name]):
            stale.append(name)
    return {"not_requantized": wrong, "stale": stale}


def _experts(named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in named if "experts" in name)
