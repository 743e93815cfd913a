"""A process group of one learner process and every rank of an engine, besides any groups that either has."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from qarl_nemo.refit.manifest import bytes_of

BACKENDS = ("nccl", "gloo")
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_BACKLOG = 1024


def listening_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Start a store that listens on one address; torch's own would listen on all of this machine's addresses.

    Args:
        host: name or address of this machine.
        timeout_s: how long to wait for a key before it is an error.

    Returns:
        The store, on a free port.

    Raises:
        ValueError: this machine has no such address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ValueError(f"cannot listen on host {host!r}, which is no address of this machine: {error}") from error
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # From here on the store owns and closes the socket.
        master_listen_fd=listener.detach(),
    )


def address_towards(host: str, port: int) -> str:
    """Return the address from which this machine reaches another one; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def make_group(store: dist.Store, rank: int, size: int, backend: str, timeout_s: float, *, host: str) -> Backend:
    """Join the group; returns when every rank has.

    Args:
        store: shared by all.
        rank: 0 is the learner.
        size: the engine's ranks and the learner.
        backend: one of `BACKENDS`.
        timeout_s: how long to wait for a broadcast before it is an error.
        host: address on which gloo listens here; NCCL uses the interface that `NCCL_SOCKET_IFNAME` names.

    Raises:
        ValueError: unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; legal: {', '.join(BACKENDS)}")
    store, timeout = dist.PrefixStore("qarl-refit", store), timedelta(seconds=timeout_s)
    if backend == "gloo":
        settings = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute] not in torch's stub
        settings._timeout = timeout
        settings._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(store, rank, size, settings)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(_BLOCKING_WAIT)
    # Otherwise NCCL's watchdog kills the engine when a learner dies; it should refuse the update and go on serving.
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(_BLOCKING_WAIT)
        if before is not None:
            os.environ[_BLOCKING_WAIT] = before


def broadcast(group: Backend, tensors: Sequence[Tensor]) -> None:
    """Send tensors from rank 0 to all others, in place, and wait until they are there.

    Args:
        group: what `make_group` returned.
        tensors: contiguous tensors with the same sizes on every rank.

    Raises:
        RuntimeError: a rank is gone, or slower than the group's timeout.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    send = group.broadcast  # pyrefly: ignore[missing-attribute] not in torch's stub
    for work in [send([bytes_of(tensor)], options) for tensor in tensors]:
        work.wait()
