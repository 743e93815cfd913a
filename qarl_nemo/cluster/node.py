"""One Ray node as a foreground process: `ray start` and, on the head, the job beside it; both end together."""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from qarl_nemo.cluster.config import EXIT_NODE_LOST, ClusterConfig
from qarl_nemo.cluster.plan import CLI

POLL_S = 0.5
STOP_WITHIN_S = 15.0
# Longer than for other processes, because the job's watch first stops the job and collects logs.
JOB_STOPS_WITHIN_S = 180.0
KILL_WITHIN_S = 10.0
HEAD_ANSWERS_WITHIN_S = 5.0
OPEN_FILES = 65535


class _StopError(Exception):
    """Told to end."""


def run_node(config: ClusterConfig, *, head: bool, head_address: str, address: str | None, lifeline: bool) -> int:
    """Be a node of the cluster until the job ends or this process is told to stop.

    Args:
        config: the cluster run.
        head: whether this node is the head, which runs checks and job.
        head_address: host name or address of the head, without port.
        address: this node's address in the cluster's network; None lets Ray find it.
        lifeline: end when standard input closes, as it does when the launcher's connection breaks.

    Returns:
        On the head what `job.run` returns, or `EXIT_NODE_LOST` if Ray ended first. On a worker 0 if it was told to end
        or its head ended, 1 if it could not join or Ray ended.
    """
    os.environ.update({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0", **config.env})
    _raise_open_files()
    signal.signal(signal.SIGTERM, _stop)
    processes: list[subprocess.Popen] = []
    try:
        if not head and not _reachable(head_address, config.ray.port, config.health.join_timeout_s, lifeline):
            return _fail(f"no head at {head_address}:{config.ray.port} after {config.health.join_timeout_s:g} s")
        processes.append(_spawn(ray_start(config, head=head, head_address=head_address, address=address)))
        if head:
            if not _reachable(head_address, config.ray.port, config.health.join_timeout_s, lifeline, processes[0]):
                return _fail(f"Ray's head did not start at {head_address}:{config.ray.port}")
            job = [sys.executable, *CLI, "run", "-", "--address", f"{head_address}:{config.ray.port}"]
            processes.append(_spawn(job, stdin=config.as_json()))
        code = _wait(processes, lifeline)
        if code is not None:
            return code
        if head:
            _fail(f"Ray ended with exit code {processes[0].returncode}; without its head the job is lost")
            return EXIT_NODE_LOST
        # Ray ends itself when its head is gone, which is how a worker learns that the job is done.
        if not _reachable(head_address, config.ray.port, HEAD_ANSWERS_WITHIN_S, lifeline):
            return 0
        return _fail(f"Ray ended with exit code {processes[0].returncode}")
    except _StopError:
        return 0
    finally:
        # The job ends first, because it collects logs from a Ray that must still run.
        for process, within_s in reversed(list(zip(processes, (STOP_WITHIN_S, JOB_STOPS_WITHIN_S), strict=False))):
            _end(process, within_s)


def ray_start(config: ClusterConfig, *, head: bool, head_address: str, address: str | None) -> list[str]:
    """Compose the `ray start` command of one node.

    Args:
        config: the cluster run.
        head: whether it is the head.
        head_address: where the head is.
        address: this node's address.

    Returns:
        The command, which uses the Python that this runs in.
    """
    where = ["--head", f"--port={config.ray.port}", "--include-dashboard=false"]
    where = where if head else [f"--address={head_address}:{config.ray.port}"]
    own = [f"--node-ip-address={address}"] if address else []
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *own]
    return [*command, "--block", "--disable-usage-stats", "--log-style=record", *config.ray.start_args]


def _wait(processes: list[subprocess.Popen], lifeline: bool) -> int | None:
    """Return the job's exit code, or None when Ray ended first."""
    ray, *job = processes
    while ray.poll() is None and not (job and job[0].poll() is not None):
        _look_at(lifeline)
        time.sleep(POLL_S)
    return job[0].poll() if job else None


def _reachable(host: str, port: int, timeout_s: float, lifeline: bool, process: subprocess.Popen | None = None) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        _look_at(lifeline)
        try:
            socket.create_connection((host, port), timeout=5).close()
            return True
        except OSError:
            time.sleep(POLL_S)
    return False


def _look_at(lifeline: bool) -> None:
    if lifeline and select.select([sys.stdin], [], [], 0)[0] and not os.read(sys.stdin.fileno(), 4096):
        raise _StopError


def _spawn(command: list[str], stdin: str = "") -> subprocess.Popen:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)
    process.stdin.write(stdin)
    process.stdin.close()
    return process


def _end(process: subprocess.Popen, within_s: float) -> None:
    """End a process and what it started in its session, by force if it does not stop."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(within_s)
    deadline = time.monotonic() + KILL_WITHIN_S
    # Again and again: one of them may start another before it is killed.
    while (left := _session(process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.poll()


def _session(leader: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Others' processes come and go; one that has ended waits for its parent and holds nothing.
        with suppress(ProcessLookupError, FileNotFoundError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and os.getsid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found


def _raise_open_files() -> None:
    """Raise the soft limit on open files, which Ray's many connections exceed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _stop(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # ending takes a while; a second signal must not interrupt it
    raise _StopError


def _fail(line: str) -> int:
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    return 1
