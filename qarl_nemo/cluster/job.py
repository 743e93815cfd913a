"""The job on a checked cluster: started on the head and ended when a node is lost; logs are kept either way."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import ray
from ray._private import services
from ray._private.utils import get_ray_address_file

from qarl_nemo.cluster.config import EXIT_NODE_LOST, EXIT_UNHEALTHY, ClusterConfig, ClusterError
from qarl_nemo.cluster.health import check
from qarl_nemo.cluster.logs import LogCollector
from qarl_nemo.cluster.nodes import Node, lost_nodes
from qarl_nemo.cluster.plan import JOB_ENDED, JOB_STARTS, shell_code
from qarl_nemo.config import ConfigError

STOP_WITHIN_S = 30.0
POLL_S = 2.0
# A cluster that is asked for its health runs already, so that nobody has to wait for it as for nodes that start.
ANSWERS_WITHIN_S = 30.0
# The job may fail over a dead node before Ray has declared it dead.
VERDICT_WITHIN_S = 30.0
_PR_SET_PDEATHSIG = 1


def run(config: ClusterConfig, address: str | None = None, tell_checked: int | None = None) -> int:
    """Check the cluster this runs on, then run the job under watch.

    Args:
        config: what is expected, and the job.
        address: address of Ray's head; by default the cluster of this machine.
        tell_checked: a pipe that gets a byte as soon as all checks have passed.

    Returns:
        The job's exit code; `EXIT_UNHEALTHY` if it was not started, `EXIT_NODE_LOST` if a node was lost; 128 + signal
        if it was told to stop.

    Raises:
        ConfigError: the address is no host and port.
        ClusterError: there is no cluster.
    """
    os.environ.update(config.env)
    with connected(address, config.health.join_timeout_s) as head:
        folder = Path(config.log_dir) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
        say = _Reporter(folder)
        try:
            nodes = check(config, _passed_on(), say)
        except ClusterError as error:
            say(f"ERROR: {error}")
            return EXIT_UNHEALTHY
        if tell_checked is not None:
            with suppress(OSError), open(tell_checked, "wb", buffering=0) as pipe:  # a node that is gone asks no more
                pipe.write(b"1")
        say(f"{JOB_STARTS}{folder}")
        return _watch(config, nodes, head, folder, say)


def check_only(config: ClusterConfig, address: str | None = None) -> int:
    """Check the cluster this runs on.

    Args:
        config: what is expected.
        address: see `run`.

    Returns:
        0.

    Raises:
        ConfigError: the address is no host and port.
        ClusterError: there is no cluster, it is incomplete or not healthy; lists every problem.
    """
    os.environ.update(config.env)
    with connected(address, config.health.join_timeout_s):
        check(config, _passed_on(), print)
    return 0


@contextmanager
def connected(address: str | None, within_s: float) -> Iterator[str]:
    """Join a running Ray cluster.

    Args:
        address: address of its head; None takes RAY_ADDRESS or the cluster of this machine.
        within_s: how long the head may take to answer, if that is less than `ANSWERS_WITHIN_S`.

    Yields:
        The head's address.

    Raises:
        ConfigError: the address is no host and port.
        ClusterError: there is no cluster.
    """
    try:
        _knock(address, min(within_s, ANSWERS_WITHIN_S))
        context = ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        where = address or os.environ.get("RAY_ADDRESS", "this machine")
        raise ClusterError(f"no Ray cluster at {where}: {error}") from error
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def _knock(address: str | None, within_s: float) -> None:
    """Raise unless something listens at the head's address: Ray itself takes minutes to give up."""
    where, source = (address, "") if address is not None else _found_by_ray()
    given = re.fullmatch(r"\[?([^\s/]+?)\]?:(\d{1,5})", where)
    if given is None or not 0 < int(given[2]) < 65536:
        if address is not None:
            raise ConfigError(f"--address {address}: expected host:port of Ray's head, such as 10.0.0.1:6379")
        return  # Ray knows other forms of RAY_ADDRESS
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((given[1], int(given[2])), timeout=within_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"no Ray cluster at {where}: nothing answers there ({error}){source}") from error
        time.sleep(min(0.5, within_s))


def _found_by_ray() -> tuple[str, str]:
    """Return the address that Ray takes if it is given none, and what to say of the file where it stands."""
    if os.environ.get("RAY_ADDRESS", "auto") not in ("", "auto"):
        return os.environ["RAY_ADDRESS"], ""
    # A head that runs here, or what the last `ray start` left behind, also if that head is long dead.
    where = services.get_ray_address_from_environment("auto", None)
    if where != services.find_bootstrap_address(None):
        return where, ""
    left = f"; that address is from {get_ray_address_file(None)}, which a Ray left that was started here before"
    return where, f"{left}: start Ray again, or say where it runs with --address"


def _passed_on() -> dict[str, str]:
    """Return the variables on which imports depend and which NeMo-RL hands from the driver to its workers."""
    names = ("PYTHONPATH", "NEMO_RL_VENV_DIR", "NEMO_RL_PY_EXECUTABLES_SYSTEM")
    return {name: os.environ[name] for name in names if name in os.environ}


def _watch(config: ClusterConfig, nodes: list[Node], head: str, folder: Path, say: "_Reporter") -> int:
    logs = LogCollector(nodes, folder, config.log_period_s, say)
    job = _Job(config, head, folder)
    try:
        return _follow(job, logs, nodes, folder, say)
    finally:
        # What it started ends with it, also where Ray has failed us.
        job.stop()


def _follow(job: "_Job", logs: LogCollector, nodes: list[Node], folder: Path, say: "_Reporter") -> int:
    lost: dict[Node, str] = {}
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    while job.code() is None and not lost and not stopped:
        time.sleep(POLL_S)
        if not stopped:  # whoever stopped the job may have stopped Ray, too, which then answers late
            lost = lost_nodes(nodes)
            logs.poll()
    code = job.code()
    deadline = time.monotonic() + VERDICT_WITHIN_S
    while code and not lost and time.monotonic() < deadline:
        time.sleep(POLL_S)
        lost = lost_nodes(nodes)
    for node, reason in lost.items():
        say(f"ERROR: node {node.name} was lost: {reason}; its logs as of the last copy: {folder}/nodes/{node.name}")
    if code is None:
        say("stopping the job: " + (f"signal {stopped[0]}" if stopped else "it cannot go on without all its nodes"))
        job.stop()
    logs.finish(lost)
    outcome = EXIT_NODE_LOST if lost and code != 0 else 128 + stopped[0] if code is None else code
    say(f"{JOB_ENDED}{outcome}; its output: {folder}/job.log, Ray's logs: {folder}/nodes")
    return outcome


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent dies: Ray aborts a driver whose head is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Reporter:
    """Says a line to the user and into the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "cluster.log"

    def __call__(self, line: str) -> None:
        stamped = f"[{datetime.now(UTC):%H:%M:%S}] {line}"
        # A launcher that is gone must not keep its job from being stopped.
        with suppress(OSError):
            print(stamped, flush=True)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(stamped + "\n")
        except OSError:
            # The health check names the folder that cannot be written.
            return


class _Job:
    """The user's command in a process group of its own, its output shown and kept."""

    def __init__(self, config: ClusterConfig, head: str, folder: Path) -> None:
        env = {**os.environ, "RAY_ADDRESS": head}
        self._process = subprocess.Popen(
            ["bash", "-c", config.command],
            cwd=config.workdir,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # In the session of this process, by which the node finds what is left of a job when this process is killed.
            process_group=0,
            preexec_fn=_end_with_parent,
        )
        self._output = threading.Thread(target=self._tee, args=(folder / "job.log",), daemon=True)
        self._output.start()

    def _tee(self, path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for line in self._process.stdout:
                for sink in (file, sys.stdout.buffer):
                    # A full disk, or a launcher that is gone, must not hold up a job that goes on writing.
                    with suppress(OSError):
                        sink.write(line)
                        sink.flush()

    def code(self) -> int | None:
        """Return the exit code of a job that ended, 128 + n if signal n ended it."""
        code = self._process.poll()
        if code is None:
            return None
        self._output.join(timeout=STOP_WITHIN_S)
        return shell_code(code)

    def stop(self) -> None:
        """End the job and all its processes, by force if they do not stop; nothing happens if all have ended."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_WITHIN_S)
            os.killpg(self._process.pid, signal.SIGKILL)
