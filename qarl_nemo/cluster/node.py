"""One Ray node as a foreground process: `ray start` and, on the head, the job beside it; both end together."""

import errno
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

from qarl_nemo.cluster.config import EXIT_NODE_LOST, EXIT_UNHEALTHY, ClusterConfig
from qarl_nemo.cluster.plan import CLI, shell_code

POLL_S = 0.5
STOP_WITHIN_S = 15.0
# Longer than for other processes, because the job's watch first stops the job and collects logs.
JOB_STOPS_WITHIN_S = 180.0
KILL_WITHIN_S = 10.0
HEAD_ANSWERS_WITHIN_S = 5.0
OPEN_FILES = 65535


class _StopError(Exception):
    """Told to end: by the signal `number`, or without one because the launcher's connection is gone."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number


def run_node(config: ClusterConfig, *, head: bool, head_address: str, address: str | None, lifeline: bool) -> int:
    """Be a node of the cluster until the job ends or this process is told to stop.

    Args:
        config: the cluster run.
        head: whether this node is the head, which runs checks and job.
        head_address: host name or address of the head, without port.
        address: this node's address in the cluster's network; None lets Ray find it.
        lifeline: end when standard input closes, as it does when the launcher's connection breaks.

    Returns:
        On the head what `job.run` returns; if Ray ended first, `EXIT_UNHEALTHY` before the checks have passed and
        `EXIT_NODE_LOST` after; if it was told to end before the job had an outcome, 128 + signal, or `EXIT_NODE_LOST`
        where the launcher is gone. On a worker 0 if it was told to end or its head ended, 1 if it could not join or
        Ray ended.
    """
    os.environ.update({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0", **config.env})
    _raise_open_files()
    signal.signal(signal.SIGTERM, _stop)
    started = _Started()
    command = ray_start(config, head=head, head_address=head_address, address=address)
    try:
        be = _be_head if head else _be_worker
        return be(config, head_address, command, lifeline, started)
    except _StopError as stop:
        started.end()
        return started.code_of_stopped(stop) if head else 0
    finally:
        started.end()


class _Started:
    """What a node has started: Ray, and on the head the job's watch, which tells when the checks have passed."""

    def __init__(self) -> None:
        self.ray: subprocess.Popen | None = None
        self.job: subprocess.Popen | None = None
        self._checks: int | None = None
        self._checked = False

    def start_job(self, config: ClusterConfig, address: str) -> None:
        """Start checks and job."""
        self._checks, tell = os.pipe()
        job = [sys.executable, *CLI, "run", "-", "--address", address, "--tell-checked", str(tell)]
        self.job = _spawn(job, stdin=config.as_json(), pass_fds=(tell,))
        os.close(tell)

    def checked(self) -> bool:
        """Return whether all checks have passed, so that the job was started."""
        if self._checks is not None and select.select([self._checks], [], [], 0)[0]:
            # At the end of a watch that said nothing there is nothing to read.
            self._checked = self._checked or bool(os.read(self._checks, 1))
        return self._checked

    def job_code(self) -> int | None:
        """Return the exit code of a job that ended by itself; Ray aborts the watch when its head is gone."""
        code = self.job.poll() if self.job else None
        if code is None or code == -signal.SIGABRT:
            return None
        code = shell_code(code)
        return code if self.checked() or code > 128 else EXIT_UNHEALTHY

    def code_of_stopped(self, stop: _StopError) -> int:
        """Return the exit code of a head that was told to end: the job's own, if it had one before that."""
        own = self.job.returncode if self.job else None
        # Ending it is what a signal of ours did.
        if own is not None and own >= 0 and own != 128 + signal.SIGTERM:
            return own
        return EXIT_NODE_LOST if stop.number is None else 128 + stop.number

    def end(self) -> None:
        """End everything; the job first, because it collects logs from a Ray that must still run."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending is all that is left to do
        for process, within_s in ((self.job, JOB_STOPS_WITHIN_S), (self.ray, STOP_WITHIN_S)):
            if process:
                _end(process, within_s)


def _be_head(config: ClusterConfig, host: str, command: list[str], lifeline: bool, started: _Started) -> int:
    port = config.ray.port
    if problem := _port_problem(host, port):
        return _fail(problem, EXIT_UNHEALTHY)
    started.ray = ray = _spawn(command)
    if not _reachable(host, port, config.health.join_timeout_s, lifeline, ray):
        return _fail(f"Ray's head did not start at {host}:{port}; the job was not started", EXIT_UNHEALTHY)
    started.start_job(config, f"{host}:{port}")
    _wait(ray, started.job, lifeline)
    code = started.job_code()
    if code is not None:
        return code
    ended = "Ray aborted the job's watch" if ray.poll() is None else f"Ray ended with exit code {ray.returncode}"
    if started.checked():
        return _fail(f"{ended}; without its head the job is lost", EXIT_NODE_LOST)
    return _fail(f"{ended} before the checks had passed; the job was not started", EXIT_UNHEALTHY)


def _be_worker(config: ClusterConfig, head: str, command: list[str], lifeline: bool, started: _Started) -> int:
    port = config.ray.port
    if not _reachable(head, port, config.health.join_timeout_s, lifeline):
        return _fail(f"no head at {head}:{port} after {config.health.join_timeout_s:g} s")
    started.ray = ray = _spawn(command)
    _wait(ray, None, lifeline)
    # Ray ends itself when its head is gone, which is how a worker learns that the job is done.
    if not _reachable(head, port, HEAD_ANSWERS_WITHIN_S, lifeline):
        return 0
    return _fail(f"Ray ended with exit code {ray.returncode}")


def _port_problem(host: str, port: int) -> str:
    """Return what keeps Ray's head from listening, or nothing."""
    with socket.socket() as probe:
        # As Ray does: connections of an earlier head that have not timed out yet do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use on {host}, perhaps by another Ray; set `ray.port` to a free one"
            return f"port {port} cannot be used on {host} ({error.strerror}); set `ray.port` to another one"
    return ""


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


def _wait(ray: subprocess.Popen, job: subprocess.Popen | None, lifeline: bool) -> None:
    """Return when Ray or the job has ended."""
    while ray.poll() is None and not (job and job.poll() is not None):
        _look_at(lifeline)
        time.sleep(POLL_S)


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


def _spawn(command: list[str], stdin: str = "", pass_fds: tuple[int, ...] = ()) -> subprocess.Popen:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True, pass_fds=pass_fds)
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
    raise _StopError(number)


def _fail(line: str, code: int = 1) -> int:
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    return code
