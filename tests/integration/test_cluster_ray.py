"""A cluster of two Ray nodes on this machine, from launcher to lost node: real Ray, CPU actors, loopback addresses.

The second node lives in a mount namespace of its own, where it has another version of a package and a folder it cannot
write, as a second machine may.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from qarl_nemo.cluster.config import ClusterConfig, ClusterError
from qarl_nemo.config import validate
from support.clusters import HEAD, ROOT, WORKER, one_machine

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs ray", allow_module_level=True)

import ray

from qarl_nemo.cluster import health, nodes

pytestmark = pytest.mark.slow
# $1 is the host, $2 the shell line of its node.
CONNECT = r"""
if [[ $1 == one || -z $NAMESPACES ]]; then exec bash -c "$2"; fi
exec unshare --user --map-root-user --mount bash -c '
  mount --bind "$FOLDER/other" "$FOLDER/site" && mount -t tmpfs -o ro none "$FOLDER/private" && exec bash -c "$0"
' "$2"
"""
# An actor on each node, as NeMo-RL's workers; what they say shows that both computed.
JOB = """
import ray, sys, time
ray.init()
@ray.remote(num_cpus=0, num_gpus=4)
class Worker:
    def node(self):
        return ray.util.get_node_ip_address()
workers = [Worker.remote() for _ in range(2)]
print("workers on", *sorted(ray.get([worker.node.remote() for worker in workers])), flush=True)
open(sys.argv[1], "w").close()
while True:
    ray.get([worker.node.remote() for worker in workers])
    time.sleep(0.2)
"""


def namespaces() -> bool:
    """Whether this machine lets us give a node its own view of the file system."""
    probe = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    with contextlib.suppress(OSError):
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HEAD, 0))
        return sock.getsockname()[1]


def package(folder: Path, version: str) -> None:
    for name in ("qarl_nemo", "qarl_formats", "qarl_kernels"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f'__version__ = "{version}"\n')
        (folder / name / "config.py").touch()


class Cluster:
    """A launched cluster and its output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "launch.log"
        small = ["--num-gpus=4", "--num-cpus=1", "--object-store-memory=80000000"]
        # Any port: two nodes of one machine cannot share a range. A short path: Ray's sockets lie in it.
        small += ["--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={folder}/ray"]
        (folder / "job.py").write_text(JOB)
        self.config = one_machine(
            folder,
            connect=["bash", "-c", CONNECT, "connect", "{host}"],
            workdir=str(ROOT),
            command=f"{sys.executable} {folder}/job.py {folder}/ready",
            python=sys.executable,
            env={"RAY_health_check_period_ms": 500, "RAY_health_check_failure_threshold": 3},
            log_period_s=1,
            ray={"port": free_port(), "start_args": small},
        )
        for name in ("site", "other", "private"):
            (folder / name).mkdir()
        package(folder / "site", "1.0")
        package(folder / "other", "2.0")
        env = {**os.environ, "FOLDER": str(folder), "NAMESPACES": "1" if namespaces() else ""}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        (folder / "cluster.json").write_text(self.config.as_json())
        with self.output.open("w") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "qarl_nemo.cluster", "launch", str(folder / "cluster.json")],
                cwd=ROOT,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, path: Path, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            assert self.launcher.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.2)

    def changed(self, **changes) -> ClusterConfig:
        return validate({**self.config.model_dump(), **changes}, ClusterConfig, source="test")


@pytest.fixture(scope="module")
def cluster():
    """Both nodes joined, checked and at work; this process looks at them as another driver."""
    # A node that is ending may still write its logs.
    with tempfile.TemporaryDirectory(prefix="qarl", ignore_cleanup_errors=True) as name:
        made = Cluster(Path(name))
        try:
            made.wait_for(made.folder / "ready", 240)
            ray.init(f"{HEAD}:{made.config.ray.port}", log_to_driver=False, logging_level="ERROR")
            yield made
        finally:
            ray.shutdown()
            made.launcher.terminate()
            made.launcher.wait(60)


def test_a_healthy_cluster_runs_the_job_on_both_nodes(cluster):
    said = cluster.output.read_text()
    assert "healthy: 2 nodes, 8 GPUs" in said
    assert f"workers on {HEAD} {WORKER}" in said
    assert f"qarl_nemo {sys.modules['qarl_nemo'].__version__} (" in said
    assert not list((cluster.folder / "checkpoints").iterdir())


def test_missing_nodes_and_gpus_are_named(cluster):
    asked = cluster.changed(
        nodes=3, health={"join_timeout_s": 0.1}, launcher={"type": "hosts", "hosts": ["1", "2", "3"]}
    )
    with pytest.raises(ClusterError, match=r"1 node\(s\) never joined"):
        nodes.wait_for_nodes(asked, print, poll_s=0.1)
    asked = cluster.changed(gpus_per_node=8, health={"join_timeout_s": 0.1})
    with pytest.raises(ClusterError) as refused:
        nodes.wait_for_nodes(asked, print, poll_s=0.1)
    for address in (HEAD, WORKER):
        assert any(
            address in line and "joined with 4 GPUs, 4 too few" in line for line in str(refused.value).split("\n")
        )


def test_another_version_and_an_unwritable_folder_on_one_node_are_both_found(cluster):
    if not namespaces():
        pytest.skip("this machine allows no mount namespaces")
    asked = cluster.changed(checkpoint_dir=str(cluster.folder / "private"))
    joined = nodes.wait_for_nodes(asked, print)
    problems, _ = health.inspect(asked, joined, {"PYTHONPATH": f"{cluster.folder}/site"})
    worker = joined[1].name
    assert joined[1].address == WORKER
    assert len(problems) == 5
    assert all(problem.startswith(worker) for problem in problems)
    assert "imports qarl_nemo 2.0" in problems[0]
    assert "not qarl_nemo 1.0" in problems[0]
    assert "private does not show the file the head wrote there, so it is not shared" in problems[3]
    assert "private cannot be written (Read-only file system)" in problems[4]


def test_a_lost_node_ends_the_job_with_its_name_and_everybodys_logs(cluster):
    """Last: it kills the cluster's second node."""
    (lost,) = [node for node in nodes.wait_for_nodes(cluster.config, print) if node.address == WORKER]
    (run,) = (cluster.folder / "logs").iterdir()
    cluster.wait_for(run / "nodes" / lost.name / "raylet.out", 120)
    ray.shutdown()
    for process in _processes("raylet/raylet", f"--node_ip_address={WORKER}", str(cluster.folder)):
        os.kill(process, signal.SIGKILL)
    assert cluster.launcher.wait(120) == 4
    said = cluster.output.read_text()
    assert f"ERROR: node {lost.name} was lost: " in said
    assert f"the job ended with exit code 4; its output: {run}/job.log" in said
    assert f"ERROR: node {lost.name} was lost: " in (run / "cluster.log").read_text()
    assert f"workers on {HEAD} {WORKER}" in (run / "job.log").read_text()
    assert {path.name.split("-")[0] for path in (run / "nodes").iterdir()} == {HEAD, WORKER}
    assert not _processes(str(cluster.folder))


def _processes(*words: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(word in line for word in words):
                found.append(int(path.parent.name))
    return found
