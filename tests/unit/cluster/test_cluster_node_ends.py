"""A head's process: its exit code says whether the job had an outcome, was never started, or was lost."""

import importlib.util
import json
import signal
import socket
import subprocess
import sys

import pytest

from support.clusters import HEAD, ROOT, one_machine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")

# The node's own program, with programs of ours in the place of Ray and of the job's watch.
NODE = """
import sys
from qarl_nemo.cluster import node
from qarl_nemo.cluster.cli import main
node.POLL_S = 0.02
ray, watch = sys.argv[1:3]
node.ray_start = lambda *_, **__: [sys.executable, "-c", ray]
spawn = node._spawn
def spawn_other(command, stdin="", **options):
    if "run" in command:
        command = [sys.executable, "-c", watch, command[-1], command[command.index("--address") + 1]]
    return spawn(command, stdin, **options)
node._spawn = spawn_other
sys.exit(main(sys.argv[3:]))
"""
LISTENS = """
import socket, sys, time
server = socket.create_server((HOST, PORT))
server.accept()
"""
WAITS = "import time, sys; print('up', flush=True); time.sleep(600)"
CALLS = "import socket; socket.create_connection(sys.argv[2].split(':')).close()\n"
CHECKED = "import os, sys; os.write(int(sys.argv[1]), b'1')\n"


def free_port():
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        return probe.getsockname()[1]


def head(folder, ray, watch, *options, listens=LISTENS):
    config = one_machine(folder, ray={"port": free_port()})
    ray = listens.replace("HOST", repr(HEAD)).replace("PORT", str(config.ray.port)) + ray
    command = [sys.executable, "-c", NODE, ray, watch, "node", "head", "--head-address", HEAD, *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    process.stdin.write(config.as_json() + "\n")
    process.stdin.flush()
    return process


def end(process):
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize("checked", ["", CHECKED])
@pytest.mark.parametrize("options", [(), ("--lifeline",)])
def test_a_head_that_a_signal_stops_ends_with_128_and_its_number(tmp_path, checked, options):
    process = head(tmp_path, "time.sleep(600)", checked + WAITS, *options)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def test_a_head_whose_launcher_is_gone_ends_as_one_that_was_lost(tmp_path):
    process = head(tmp_path, "time.sleep(600)", CHECKED + WAITS, "--lifeline")
    assert process.stdout.readline() == "up\n"
    assert end(process)[0] == 4  # `communicate` closes its standard input


def test_a_job_that_has_an_outcome_when_its_head_is_stopped_keeps_it(tmp_path):
    orderly = "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(5))\n"
    process = head(tmp_path, "time.sleep(600)", CHECKED + orderly + WAITS)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 5


@pytest.mark.parametrize(
    ("ray", "watch", "code", "says"),
    [
        ("sys.exit(7)", WAITS, 3, "ERROR: Ray ended with exit code 7 before the checks had passed; the job was not"),
        (
            "server.accept(); sys.exit(7)",
            CHECKED + CALLS + WAITS,
            4,
            "ERROR: Ray ended with exit code 7; without its head the",
        ),
        ("time.sleep(600)", "import os; os.abort()", 3, "ERROR: Ray aborted the job's watch before the checks had"),
        ("time.sleep(600)", CHECKED + "os.abort()", 4, "ERROR: Ray aborted the job's watch; without its head"),
        ("time.sleep(600)", "import os; os.kill(os.getpid(), 9)", 137, ""),
        ("time.sleep(600)", "raise RuntimeError('no answer')", 3, "RuntimeError: no answer"),
        ("time.sleep(600)", CHECKED + "sys.exit(1)", 1, ""),
        ("time.sleep(600)", CHECKED, 0, ""),
    ],
)
def test_a_heads_code_says_whether_the_job_was_started(tmp_path, ray, watch, code, says):
    ended, said = end(head(tmp_path, ray, watch))
    assert (ended, says in said) == (code, True), said


def test_a_port_in_use_is_named_with_the_key_before_ray_starts(tmp_path):
    command = [sys.executable, "-m", "qarl_nemo.cluster", "node", "head", "--head-address", HEAD]
    with socket.create_server((HEAD, 0)) as other:
        port = other.getsockname()[1]
        sent = json.dumps(json.loads(one_machine(tmp_path).as_json()) | {"ray": {"port": port}}) + "\n"
        done = subprocess.run(command, cwd=ROOT, input=sent, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert done.stderr.startswith(f"ERROR: port {port} is in use on {HEAD}, ")
    assert "set `ray.port`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_ray_that_does_not_start_is_no_lost_node(tmp_path):
    ended, said = end(head(tmp_path, "", WAITS, listens="import sys; sys.exit(1)"))
    assert ended == 3
    assert "ERROR: Ray's head did not start at 127.0.0.2:" in said
