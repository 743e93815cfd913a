"""The job of a cluster run, whose launcher may be gone: nobody reads what is shown, and everything is kept."""

import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from qarl_nemo.cluster import job


class Gone:
    """Standard output whose reader has ended."""

    def write(self, _):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError

    buffer = property(lambda self: self)


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
