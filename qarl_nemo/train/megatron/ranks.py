"""Several ranks behind one: every rank does what the first is asked to do."""

import contextlib
import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from qarl_nemo.config import write_yaml
from qarl_nemo.megatron.gather import empty, layout_of
from qarl_nemo.refit.exchange import broadcast_bytes, broadcast_plain, waiting_group
from qarl_nemo.train.run_dir import RunToldError
from qarl_nemo.train.stop_request import StopRequest

_TORCHRUN = "qarl_nemo.train.megatron.torchrun"
# Ranks of one host talk over its loopback. torchrun sets one thread a rank, too, but says so in four lines.
_DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
# Names the file in which the ranks of `launch_ranks` find each other.
_STORE = "QARL_RANKS_STORE"
# Beside it, once the ranks are told to end.
_STOP = "stop"
# Beside it, locked as long as the process lives that launched the ranks.
_LAUNCHER = "launcher_lives"
# The timeout of a wait for the next command, during which the first rank generates, validates and saves.
_PATIENCE = timedelta(days=1)


def launch_ranks(ranks: int, program: Sequence[str], settings: Mapping[str, Any] | None = None) -> int:
    """Run a program once per rank on this host; ranks meet through a file, so that nothing listens on the network.

    Args:
        ranks: how many.
        program: arguments of the Python interpreter.
        settings: written into a file that no other command knows, which is the program's last argument.

    Returns:
        The exit code: 0, 1 where a rank failed, after which the others were ended, or `RunToldError`'s where this
        process or a rank was told to end.
    """
    with tempfile.TemporaryDirectory(prefix="qarl-ranks-") as folder:
        # torch's own rendezvous would listen on every interface.
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/launcher", "--rdzv-conf=store_type=file"]
        launch = [sys.executable, "-m", _TORCHRUN, "--nnodes=1", f"--nproc-per-node={ranks}", *meeting]
        environment = _DEFAULTS | os.environ | {_STORE: f"{folder}/ranks"}
        if settings is not None:
            file = Path(folder) / "ranks.yaml"
            write_yaml(file, settings)
            program = [*program, str(file)]
        with (Path(folder) / _LAUNCHER).open("w") as lives, StopRequest(Path(folder) / _STOP) as request:
            fcntl.flock(lives, fcntl.LOCK_EX)
            code = subprocess.run([*launch, *program], env=environment, check=False).returncode
            return RunToldError.exit_code if request.made else code


def end_with_launcher() -> None:
    """End this process as soon as that of `launch_ranks` has ended, which a signal may have ended at once.

    Else ranks that nobody waits for would train on, and keep the run's folder and the GPUs from the same command.
    """
    if _STORE in os.environ:
        place = (Path(os.environ[_STORE]).parent, os.getppid())
        threading.Thread(target=_follow_launcher, args=place, daemon=True).start()


def _follow_launcher(folder: Path, torchrun: int) -> None:
    # The launcher removes the folder where it can. The system frees a lock with the process, however that ends.
    with contextlib.suppress(FileNotFoundError), (folder / _LAUNCHER).open() as lives:
        fcntl.flock(lives, fcntl.LOCK_SH)
    # It would wait for its ranks' files without end.
    if os.getppid() == torchrun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(torchrun, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def stop_request() -> StopRequest:
    """Return the request to end that all ranks of `launch_ranks` and the process that launched them share."""
    store = os.environ.get(_STORE)
    return StopRequest(Path(store).parent / _STOP if store else None)


def start_ranks(device: torch.device, **sizes: int) -> Any:
    """Join the ranks that `launch_ranks` or torchrun started, if any, and make Megatron's process groups.

    Args:
        device: this rank's device, already the current one.
        sizes: `tensor_model_parallel_size`, `expert_model_parallel_size`, `expert_tensor_parallel_size`.

    Returns:
        The group over which commands are sent.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    meeting: dict[str, Any] = {}
    if "RANK" not in os.environ:
        meeting = {"store": dist.HashStore(), "rank": rank, "world_size": size}
    elif _STORE in os.environ:
        meeting = {"store": dist.FileStore(os.environ[_STORE], size), "rank": rank, "world_size": size}
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
        named: the first rank's tensors; None elsewhere.
        device: where the result goes.
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
    """Stands for an object on the first rank: its methods run on all ranks, its attributes are the first rank's.

    Args:
        target: the first rank's object; every rank has one.
        group: what `start_ranks` returned.
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
        """Release the other ranks."""
        self._send(None)

    def _send(self, command: Any) -> None:
        if self._group.size() > 1:
            buffer = io.BytesIO()
            torch.save(command, buffer)
            broadcast_bytes(buffer.getvalue(), self._group)


def follow(target: Any, group: Any, device: torch.device, types: Sequence[type] = ()) -> None:
    """Do what the first rank is asked to do, until it calls `dismiss`.

    Args:
        target: this rank's object; only its public methods can be called.
        group: what `start_ranks` returned.
        device: this rank's device, where tensors among the arguments go.
        types: legal types of arguments, besides tensors and plain data. The ranks' port does not authenticate, so a
            message must not be able to name anything else.

    Raises:
        ValueError: a message is not a command.
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
