"""Nodes run together: how a launch ends, and what it says of nodes that ended early."""

import re

import pytest

from qarl_nemo.cluster import plan as plans
from qarl_nemo.cluster.cli import plan
from qarl_nemo.cluster.plan import Plan, Step
from support.clusters import example

TITLES = ("head a", "worker b")
STARTS = "echo '[09:00:00] run folder: /logs/1'; "
ENDS = "echo '[09:00:01] the job ended with exit code {}; its output: /logs/1/job.log'; "


def launch(head: str, worker: str = "cat") -> int:
    """Run a head and a worker, which are lines for bash; both have read the config."""
    steps = [
        Step(title, ("bash", "-c", f"read -r _; {line}"), "{}")
        for title, line in zip(TITLES, (head, worker), strict=True)
    ]
    return Plan(tuple(steps), together=True).execute()


def test_nodes_run_together_end_with_the_head_and_show_whose_words_are_whose(tmp_path, capfd):
    ended = tmp_path / "ended"
    head = f"sleep 1; {STARTS}{ENDS.format(5)} exit 5"
    assert launch(head, f"echo got it; cat; echo > {ended}") == 5
    said = capfd.readouterr()
    assert "[b] got it" in said.out
    assert said.err == ""
    assert ended.exists()  # its standard input was closed, and it ended by itself


def test_a_node_that_ends_early_is_reported_with_its_last_words(capfd):
    assert launch(f"{STARTS} sleep 2; exit 4", "sleep 0.5; echo no Ray here; exit 9") == 4
    assert "worker b ended with exit code 9:\n    no Ray here" in capfd.readouterr().err


def test_a_worker_that_ends_before_the_job_ends_the_launch_at_once(capfd):
    # The head waits until it is closed, and then calls it a success.
    assert launch("cat; exit 0", "echo connection refused; exit 255") == 3
    said = capfd.readouterr().err
    assert "ERROR: worker b ended with exit code 255:\n    connection refused" in said
    assert "ERROR: worker b ended before the job, which needs all 2 nodes, was started; closing all" in said


def test_a_head_that_has_to_be_closed_after_a_loss_never_ends_the_launch_with_0(capfd, monkeypatch):
    monkeypatch.setattr(plans, "HEAD_ENDS_WITHIN_S", 0.5)
    assert launch(f"{STARTS} cat; exit 0", "sleep 0.5; exit 1") == 4
    assert "ERROR: the head did not end by itself in 0.5 s after it lost worker b; closing it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("head", "code", "reported"),
    [
        ("echo no route; exit 255", 3, True),
        ("echo cd: no such folder; exit 1", 3, True),
        ("exit 0", 3, True),
        ("kill -9 $$", 3, True),
        ("echo ERROR: not healthy; exit 3", 3, False),
        ("exit 143", 143, False),
        (f"{STARTS} exit 255", 4, True),
        (f"{STARTS} exit 0", 4, True),
        (f"{STARTS} exit 3", 4, False),
        (f"{STARTS} {ENDS.format(255)} exit 255", 255, False),
        (f"{STARTS} {ENDS.format(0)} exit 255", 0, False),
        (f"{STARTS} {ENDS.format(143)} exit 4", 4, False),
    ],
)
def test_a_launch_has_the_jobs_code_or_says_whether_the_job_was_started(head, code, reported, capfd):
    assert launch(head) == code
    assert ("ERROR: head a ended with exit code" in capfd.readouterr().err) == reported


def test_slurm_leaves_the_head_the_time_for_its_verdict():
    health = "health={join_timeout_s: 1000.5, check_timeout_s: 400}"
    script = plan(example("slurm", health)).steps[1].stdin
    assert int(re.search(r"--wait=(\d+)", script)[1]) > 1000.5 + 400
