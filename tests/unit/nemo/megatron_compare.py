"""How a layout's training step compares with the expected one, in figures and names."""

from typing import Any

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """How far apart two tensors are."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def same_bytes(actual: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal in dtype, shape and every byte."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (actual, expected)))


def summary(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """How one rank's result compares with the expected one, in figures and names that are to be none."""
    published, first = result["published"], result["ep_rank"]
    right, grads = expected["published"], result["grads"]
    return {
        "loss": result["loss"],
        "loss_error": abs(result["loss"] / expected["loss"] - 1),
        "grad_errors": grads and {name: relative_error(grad, expected["grads"][name]) for name, grad in grads.items()},
        "differing": [
            name
            for name in sorted(set(published) | set(right))
            if name not in published or name not in right or not same_bytes(published[name], right[name])
        ],
        "wrong_shards": [
            name
            for name, shard in result["shards"].items()
            if not same_bytes(shard, published[name][first * len(shard) : (first + 1) * len(shard)])
        ],
        "not_requantized": [
            name for name, tensor in result["requantized"].items() if not same_bytes(result["stepped"][name], tensor)
        ],
        # Scales of blocks whose largest weight did not change may stay as they were.
        "stale": [name for name in result["requantized"] if same_bytes(result["stepped"][name], published[name])],
    }
