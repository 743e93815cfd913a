"""The job of a cluster run, whose launcher may be gone: nobody reads what is shown, and everything is kept."""

import contextlib
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("ray")

from qarl_nemo.cluster import job, logs, node


class Named(NamedTuple):
    """Stands for a node."""

    name: str


class Gone:
    """Standard output whose reader has ended."""

    def write(self, _):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError

    buffer = property(lambda self: self)


def test_logs_that_could_not_be_copied_once_are_copied_again_and_told_of_once(monkeypatch, tmp_path):
    only, started, said = Named("a"), [], []
    monkeypatch.setattr(logs, "run_on", lambda nodes, *_: started.append(list(nodes)) or dict.fromkeys(nodes, 0))
    monkeypatch.setattr(logs.ray, "wait", lambda copies, timeout: (copies, []))
    monkeypatch.setattr(logs, "results", lambda done, timeout_s: ({}, dict.fromkeys(done, "a file is gone")))
    collector = logs.LogCollector([only], tmp_path, period_s=0.0, say=said.append)
    for _ in range(3):
        collector.poll()
    assert (started, said) == ([[only]] * 3, ["logs of a are not complete: a file is gone"])


def test_a_launcher_that_is_gone_costs_no_line_of_the_logs(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", Gone())
    say = job._Reporter(tmp_path)
    say("stopping the job")
    assert (tmp_path / "cluster.log").read_text().endswith("] stopping the job\n")
    config = SimpleNamespace(command="seq 100000; exit 3", workdir=tmp_path)
    running = job._Job(config, "head:1", tmp_path)
    deadline = time.monotonic() + 30
    while (code := running.code()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert code == 3
    assert (tmp_path / "job.log").read_text().splitlines()[-1] == "100000"


def test_a_log_folder_that_is_full_does_not_hold_the_job_up(monkeypatch, tmp_path):
    (tmp_path / "job.log").symlink_to("/dev/full")
    config = SimpleNamespace(command="seq 100000; exit 3", workdir=tmp_path)
    running = job._Job(config, "head:1", tmp_path)
    deadline = time.monotonic() + 30
    while (code := running.code()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert code == 3


ABORTED = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from qarl_nemo.cluster import job
folder = Path(sys.argv[1])
job._Job(SimpleNamespace(command=sys.argv[2], workdir=folder), "head:1", folder)
log = folder / "job.log"
while not (log.exists() and log.read_text()):
    time.sleep(0.01)
os.abort()
"""


@pytest.mark.parametrize("command", ["echo up; sleep 600; true", "echo up; sleep 600 | cat", "echo up; exec sleep 600"])
def test_a_node_leaves_nothing_of_a_job_whose_watch_was_aborted(tmp_path, command):
    watch = node._spawn([sys.executable, "-c", ABORTED, str(tmp_path), command])
    assert watch.wait(60) == -signal.SIGABRT
    node._end(watch, 1.0)
    assert node._session(watch.pid) == []


@pytest.mark.parametrize("command", ["sleep 600; true", "sleep 600 > /dev/null 2>&1 & sleep 0.5"])
def test_a_watch_leaves_nothing_of_its_job_however_it_ends(monkeypatch, tmp_path, command):
    def lost(_):
        if command.endswith("true"):
            raise RuntimeError("Ray answers no more")
        return {}

    started = []
    monkeypatch.setattr(job, "lost_nodes", lost)
    monkeypatch.setattr(job, "POLL_S", 0.1)
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(job, "LogCollector", lambda *_: SimpleNamespace(poll=lambda: None, finish=lambda _: None))
    monkeypatch.setattr(job, "_Job", lambda *words, kind=job._Job: started.append(kind(*words)) or started[0])
    config = SimpleNamespace(command=command, workdir=tmp_path, log_period_s=1.0)
    with contextlib.suppress(RuntimeError):
        assert job._watch(config, [], "head:1", tmp_path, print) == 0
    deadline = time.monotonic() + 30
    while alive(started[0]._process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(started[0]._process.pid)


def test_a_job_that_a_signal_ended_has_a_shells_exit_code(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(job, "lost_nodes", lambda _: {})
    monkeypatch.setattr(job, "POLL_S", 0.05)
    monkeypatch.setattr(job, "VERDICT_WITHIN_S", 0.0)
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(job, "LogCollector", lambda *_: SimpleNamespace(poll=lambda: None, finish=lambda _: None))
    config = SimpleNamespace(command="kill -9 $$", workdir=tmp_path, log_period_s=1.0)
    assert job._watch(config, [], "head:1", tmp_path, said.append) == 137
    assert said[-1].startswith("the job ended with exit code 137; ")


def alive(session):
    """Whether a process of a session runs; what nobody has waited for yet does not."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, _, own, *_ = file.read_text().rpartition(")")[2].split()
            if state != "Z" and int(own) == session:
                return True
    return False
