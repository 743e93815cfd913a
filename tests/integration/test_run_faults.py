"""A run that is killed, interrupted or out of disk space at a file-system call says so and goes on to the same end."""

import pytest
from kill_points import KILLED, QarlServer
from kill_pool import Counts
from train_kills import FORMATS, PRELOAD, KilledRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with QarlServer(PRELOAD) as qarl:
        yield KilledRun(qarl, tmp_path_factory.mktemp("faults") / "run", FORMATS["w4a16"])


def number_of(run, *parts):
    """The first call that names all of these."""
    return next(number for number, call in enumerate(run.calls, start=1) if all(part in call for part in parts))


KILLS = {
    "the optimizer is half written": ("write", "step_000002.partial/optimizer.pt"),
    "the list of files is missing": ("open", "step_000002.partial/files.json"),
    "an older one is named as deleted": ("rename", "step_000001.deleted"),
    "an older one is half deleted": ("rmdir", "step_000001.deleted"),
    "a step is half written": ("write", "metrics.jsonl"),
}


@pytest.mark.parametrize("call", KILLS.values(), ids=KILLS)
def test_a_run_killed_at_a_call_goes_on_to_the_same_end(call, run):
    counts = Counts()
    run.kill(counts, fault="kill", at=number_of(run, *call) + (call[0] == "write"))
    assert (counts.kills, counts.identical, counts.different) == (1, 1, [])


FULL = {
    "optimizer.pt": (("write", "step_000002.partial/optimizer.pt"), "step_000002: the checkpoint cannot be written: "),
    "metrics": (("write", "metrics.jsonl"), "metrics.jsonl: step 1 cannot be written: "),
    "tensorboard": (("write", "tfevents"), "cannot be written: "),
}


@pytest.mark.parametrize(("call", "message"), FULL.values(), ids=FULL)
def test_a_full_disk_is_one_line_and_the_run_goes_on_after_it(call, message, run):
    ended = run.meet("full", number_of(run, *call))
    assert ended.code == 2
    assert "Traceback" not in ended.output
    last = ended.output.splitlines()[-1]
    assert message in last
    assert "the disk is full" in last
    assert run.go_on() == ""


def test_an_interrupted_run_says_where_it_stands(run):
    ended = run.meet("interrupt", number_of(run, "write", "step_000002.partial/optimizer.pt"))
    assert ended.code == 130
    assert ended.output.splitlines()[-1] == "qarl: stopped at step 2, checkpoint 1; the same command goes on"
    assert not (run.run_dir / ".lock").exists()
    assert run.go_on() == ""


def test_the_harness_notices_a_run_that_ended_otherwise(run):
    assert run.meet("kill", number_of(run, "write", "step_000002.partial/optimizer.pt")).code == KILLED
    lines = (run.run_dir / "metrics.jsonl").read_text()
    (run.run_dir / "metrics.jsonl").write_text(lines.replace('"reward/mean": ', '"reward/mean": 1'))
    assert run.go_on() == "other metrics"
