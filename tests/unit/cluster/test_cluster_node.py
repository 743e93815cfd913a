"""A node's process before Ray starts: how it ends, and what it would start."""

import importlib.util
import subprocess
import sys

import pytest

from support.clusters import ROOT, one_machine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


def worker(config, *options):
    """A worker whose head is not there; nothing listens on port 9 of a loopback address."""
    command = [
        sys.executable,
        "-m",
        "qarl_nemo.cluster",
        "node",
        "worker",
        "--head-address",
        "127.0.0.9",
        *options,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdin.write(config.as_json() + "\n")
    process.stdin.flush()
    return process


def test_a_worker_without_a_head_gives_up_with_the_address(tmp_path):
    process = worker(one_machine(tmp_path, ray={"port": 9}, health={"join_timeout_s": 0.5}))
    assert process.wait(60) == 1
    assert process.stderr.read() == "ERROR: no head at 127.0.0.9:9 after 0.5 s\n"


def test_a_worker_ends_when_its_launcher_is_gone(tmp_path):
    process = worker(one_machine(tmp_path, ray={"port": 9}), "--lifeline")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.stdin.close()
    assert process.wait(30) == 0


def test_a_config_that_is_no_json_is_refused():
    command = [sys.executable, "-m", "qarl_nemo.cluster", "node", "worker", "--head-address", "a"]
    done = subprocess.run(command, cwd=ROOT, input="nodes: 2\n", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "standard input holds no config in JSON" in done.stderr


def test_head_and_worker_differ_in_where_and_share_the_rest(tmp_path):
    from qarl_nemo.cluster.node import ray_start

    config = one_machine(tmp_path)
    head = ray_start(config, head=True, head_address="10.0.0.1", address="10.0.0.1")
    join = ray_start(config, head=False, head_address="10.0.0.1", address=None)
    assert head[4:8] == ["--head", "--port=6379", "--include-dashboard=false", "--node-ip-address=10.0.0.1"]
    assert join[4:5] == ["--address=10.0.0.1:6379"]
    assert head[8:] == join[5:]
    assert "--block" in head
    assert head[-2:] == ["--min-worker-port=2000", "--max-worker-port=2999"]
