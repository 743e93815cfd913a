"""Several ranks behind one: what the first is asked to do, all do."""

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from qarl_nemo.megatron.gather import empty, layout_of
from qarl_nemo.refit.exchange import broadcast_bytes, broadcast_plain, waiting_group

# Names the file in which the ranks of `launch_ranks` find each other.
_STORE = "QARL_RANKS_STORE"
# Between two commands the first rank generates, validates and saves.
_PATIENCE = timedelta(days=1)


def launch_ranks(ranks: int, program: Sequence[str]) -> int:
    """Run a program once a rank on this host; the ranks find each other through a file, and nothing listens beyond it.

    Args:
        ranks: how many.
        program: arguments of the Python interpreter.

    Returns:
        The exit code: 0, or that of a rank that failed, after which the others were ended.
    """
    with tempfile.TemporaryDirectory(prefix="qarl-ranks-") as folder:
        # torch's own rendezvous would listen on every interface.
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/launcher", "--rdzv-conf=store_type=file"]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", *meeting]
        environment = (
            {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | os.environ | {_STORE: f"{folder}/ranks"}
        )
        return subprocess.run([*launch, *program], env=environment, check=False).returncode


def start_ranks(device: torch.device, **sizes: int) -> Any:
    """Join the ranks that `launch_ranks` or torchrun started, or be the only one, and make Megatron's process groups.

    Args:
        device: this rank's device, already the current one.
        sizes: `tensor_model_parallel_size`, `expert_model_parallel_size`, `expert_tensor_parallel_size`.

    Returns:
        The group on which commands travel.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if "RANK" not in os.environ:
        meeting = {"store": dist.HashStore(), "rank": rank, "world_size": size}
    elif _STORE in os.environ:
        meeting = {"store": dist.FileStore(os.environ[_STORE], size), "rank": rank, "world_size": size}
    else:
        meeting = {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **meeting)
    parallel_state.initialize_model_parallel(**sizes)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
    return dist.new_group(backend="gloo", timeout=_PATIENCE)


def end_ranks() -> None:
    """Leave Megatron's process groups and this job's."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def broadcast_each(named: list[tuple[str, Tensor]] | None, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the first rank's tensors on every rank, one at a time.

    Args:
        named: what the first rank has; None elsewhere.
        device: where the result goes.

    Yields:
        Names and tensors.
    """
    if dist.get_world_size() == 1:
        assert named is not None
        yield from named
        return
    layout = broadcast_plain(layout_of(named), waiting_group())
    for place, (name, *record) in enumerate(layout):
        if named is None:
            tensor = empty(*record, device)
        else:
            tensor = named[place][1].detach().to(device).contiguous()
        dist.broadcast(tensor, src=0)
        yield name, tensor


class Leader:
    """The first rank's object: a method that is called here is called on all ranks, an attribute is the first's.

    Args:
        target: what every rank has.
        group: of `start_ranks`.
    """

    def __init__(self, target: Any, group: Any) -> None:
        self._target = target
        self._group = group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return partial(self._everywhere, name) if callable(value) else value

    def _everywhere(self, name: str, *arguments: Any) -> Any:
        self._send((name, arguments))
        return getattr(self._target, name)(*arguments)

    def dismiss(self) -> None:
        """Let the other ranks go."""
        self._send(None)

    def _send(self, command: Any) -> None:
        if self._group.size() > 1:
            buffer = io.BytesIO()
            torch.save(command, buffer)
            broadcast_bytes(buffer.getvalue(), self._group)


def follow(target: Any, group: Any, device: torch.device, types: Sequence[type] = ()) -> None:
    """Do what the first rank is asked to, until it lets go.

    Args:
        target: this rank's object; its public methods are what it can be asked.
        group: of `start_ranks`.
        device: this rank's device, where tensors among the arguments go.
        types: of which arguments may be, beside tensors and plain data. The port that ranks meet on asks nobody who he
            is, so that what arrives must not be able to name anything else.

    Raises:
        ValueError: what arrived is no command.
    """
    while True:
        content = io.BytesIO(broadcast_bytes(b"", group))
        try:
            with torch.serialization.safe_globals(list(types)):
                command = torch.load(content, map_location=device, weights_only=True)
        except UnpicklingError as error:
            raise ValueError(f"the first rank sent what is no command: {error}") from error
        if command is None:
            return
        name, arguments = command
        if name.startswith("_"):
            raise ValueError(f"the first rank asked for {name!r}, which is no public method")
        getattr(target, name)(*arguments)
