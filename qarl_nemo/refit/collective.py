"""A process group of one learner process and every rank of an engine, beside whatever groups either has."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from qarl_nemo.refit.manifest import bytes_of

BACKENDS = ("nccl", "gloo")
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def make_group(store: dist.Store, rank: int, size: int, backend: str, timeout_s: float) -> dist.Backend:
    """Join the group; returns when every rank has.

    Args:
        store: shared by all.
        rank: 0 is the learner.
        size: the engine's ranks and the learner.
        backend: one of `BACKENDS`.
        timeout_s: after which waiting for a broadcast is an error.

    Returns:
        The group.

    Raises:
        ValueError: unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; legal: {', '.join(BACKENDS)}")
    store, timeout = dist.PrefixStore("qarl-refit", store), timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(_BLOCKING_WAIT)
    # Else NCCL's watchdog kills the engine when a learner dies, where it should refuse the update and serve on.
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(_BLOCKING_WAIT)
        if before is not None:
            os.environ[_BLOCKING_WAIT] = before


def broadcast(group: dist.Backend, tensors: Sequence[Tensor]) -> None:
    """Send tensors from rank 0 to all others, in place, and wait until they are there.

    Args:
        group: of `make_group`.
        tensors: contiguous, of equal sizes on every rank.

    Raises:
        RuntimeError: a rank is gone, or slower than the group's timeout.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for work in [group.broadcast([bytes_of(tensor)], options) for tensor in tensors]:
        work.wait()
