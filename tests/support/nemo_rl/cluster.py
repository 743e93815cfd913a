"""A separate Ray cluster on some of a host's GPUs, whatever else runs there; ends everything that it started."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

TESTS = Path(__file__).parents[2]
# Ports of one cluster, from its first one on.
_NUM_PORTS = 2000
_START_S = 60.0
_END_S = 10.0


@ray.remote(num_cpus=0, num_gpus=1)
class Holder:
    """Keeps one GPU from everybody else."""

    def gpu(self) -> int:
        """Return its number."""
        return int(ray.get_gpu_ids()[0])


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster.

    Attributes:
        address: host:port.
        folder: its temporary files.
        environment: variables for programs that use it.
        process: the process that started it, ancestor of all its processes.
    """

    address: str
    folder: Path
    environment: Mapping[str, str]
    process: psutil.Process

    @property
    def worker_logs(self) -> list[Path]:
        """What its workers wrote, by file."""
        logs = self.folder / "ray" / "session_latest" / "logs"
        return [*logs.glob("worker-*.err"), *logs.glob("worker-*.out")]

    def actors(self, name: str) -> list[psutil.Process]:
        """Return the processes of a class of actors."""
        return [one for one in _below(self.process) if _title(one).startswith(f"ray::{name}")]


@contextmanager
def ray_cluster(gpus: Sequence[int], num_host_gpus: int, port: int | None = None) -> Iterator[Cluster]:
    """Start a cluster whose free GPUs are the given ones.

    NeMo-RL's learner uses Ray's number of a GPU as CUDA's, so every process has to see all of the host's GPUs; idle
    actors reserve those that belong to others.

    Args:
        gpus: as the host numbers them.
        num_host_gpus: how many the host has.
        port: first of 2000 free ones; None looks for them.

    Yields:
        The cluster.
    """
    # Names of Unix sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="qarl_", dir="/tmp"))
    port = _free_ports() if port is None else port
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    every = ",".join(map(str, range(num_host_gpus)))
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": every}
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *(f"--port={port}", f"--num-gpus={num_host_gpus}", "--num-cpus=16", f"--temp-dir={folder / 'ray'}"),
        *("--include-dashboard=false", "--object-store-memory=2000000000"),
        *(f"--dashboard-agent-listen-port={port + 1}", f"--metrics-export-port={port + 2}"),
        *(f"--min-worker-port={port + 100}", f"--max-worker-port={port + _NUM_PORTS - 100}"),
    ]
    with (folder / "ray.txt").open("w") as output:
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    address = f"127.0.0.1:{port}"
    try:
        _connect(address, started, folder / "ray.txt")
        holders = _hold_others(gpus, num_host_gpus)
        process = psutil.Process(started.pid)
        yield Cluster(address, folder, environment | {"RAY_ADDRESS": address}, process)
        del holders
    finally:
        ray.shutdown()
        end(started)
        shutil.rmtree(folder, ignore_errors=True)


def end(process: subprocess.Popen) -> None:
    """End a program and all that it started."""
    if process.poll() is not None:
        return
    below = _below(psutil.Process(process.pid))
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
    for one in below:
        # psutil tells another process with the same number apart.
        if one.is_running():
            one.kill()
    process.wait()
    # A killed process still counts as running for a moment.
    deadline = time.monotonic() + _END_S
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that nobody has waited for since its end does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _connect(address: str, started: subprocess.Popen, output: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            ray.init(address, log_to_driver=False, logging_level="error")
            return
        except ConnectionError:
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start:\n{output.read_text()[-3000:]}") from None
            time.sleep(0.5)


def _hold_others(gpus: Sequence[int], num_host_gpus: int) -> list[ray.actor.ActorHandle]:
    holders = [Holder.remote() for _ in range(num_host_gpus)]
    held = ray.get([holder.gpu.remote() for holder in holders], timeout=_START_S)
    for holder, gpu in zip(holders, held, strict=True):
        if gpu in gpus:
            ray.kill(holder)
    deadline = time.monotonic() + _START_S
    while ray.available_resources().get("GPU", 0) < len(gpus):
        assert time.monotonic() < deadline, f"GPUs {list(gpus)} were not given back"
        time.sleep(0.2)
    return [holder for holder, gpu in zip(holders, held, strict=True) if gpu not in gpus]


def _free_ports() -> int:
    for first in range(20000, 32000, _NUM_PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("", first))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports between 20000 and 32000")


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
