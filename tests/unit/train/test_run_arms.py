"""Arms as processes: what each is started with, how many run at a time, and which of them failed."""

import itertools
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from qarl_nemo.config import literal, load_config, validate, write_yaml
from qarl_nemo.train.arms import expand_arms, run_arms
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.gpu_pool import SHARE
from qarl_nemo.train.run_dir import RunToldError

# In the place of `python -m qarl_nemo.cli train <config>`.
PROGRAM = """#!/bin/sh
folder=$(dirname "$4")
echo "$1 $2 $3"
echo "threads $OMP_NUM_THREADS, GPUs $CUDA_VISIBLE_DEVICES, share $QARL_SHARE"
echo "began $QARL_STARTED"
echo "start $folder" >> "$folder/../order"
sleep 0.1
echo "end $folder" >> "$folder/../order"
case "$folder" in
    *broken*) seq 20; exit 3 ;;
    *killed*) kill -9 $$ ;;
    *waits*) echo $$; kill $PPID; exec sleep 60 ;;
esac
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs arms in folders of `tmp_path` and returns the lines of the order in which they began and ended."""

    def run(arms, parallel, **values):
        program = tmp_path / "program"
        program.write_text(PROGRAM.replace("QARL_SHARE", SHARE))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        compare = {"seeds": [1], "arms": {name: {} for name in arms}}
        base = {"run_dir": str(tmp_path), "policy": {"model_init": {}}, "loss_fn": {"objective": "tbpo"}}
        runs = expand_arms(validate(base | values | {"compare": compare}, LocalConfig, source="test"), "test")
        try:
            folders = run_arms(runs, parallel)
            assert folders == [config.run_dir for config in runs]
        finally:
            lines = (tmp_path / "order").read_text().splitlines()
            run.order = [line.replace(str(tmp_path) + "/", "") for line in lines]
        return [(folder / "log.txt").read_text().splitlines() for folder in folders]

    return run


def test_as_many_run_at_a_time_as_was_said(started):
    logs = started(["a", "b"], 1, device="cpu", num_threads=3)
    assert started.order == ["start a-seed1", "end a-seed1", "start b-seed1", "end b-seed1"]
    assert [log[0] for log in logs] == ["-m qarl_nemo.cli train"] * 2
    assert [log[1].split(",")[0] for log in logs] == ["threads 3"] * 2


def test_a_limit_is_that_of_all_runs_together(started, monkeypatch, capsys, tmp_path):
    # A second goes by at each look: the first two start within the limit, and count from the same beginning.
    ticks = itertools.count(1000.0)
    monkeypatch.setattr("qarl_nemo.train.arms.time", SimpleNamespace(**vars(time) | {"time": lambda: next(ticks)}))
    limit = {"checkpoint_must_save_by": "00:00:00:03"}
    with pytest.raises(AssertionError, match="c-seed1"):
        started(["a", "b", "c", "d"], 1, device="cpu", checkpointing=limit)
    assert started.order == [f"{what} {name}-seed1" for name in "ab" for what in ("start", "end")]
    logs = [(tmp_path / f"{name}-seed1" / "log.txt").read_text().splitlines() for name in "ab"]
    assert [log[2] for log in logs] == ["began 1000.0"] * 2
    assert "d-seed1 not started, 00:00:00:03 is over; the same command starts it" in capsys.readouterr().out


def test_arms_whose_names_hold_brackets_are_told_as_they_are(started, capsys):
    started(["QaRL [w4a16]", "QaRL [/mlp]"], 1, device="cpu")
    printed = capsys.readouterr().out
    assert "QaRL [w4a16]-seed1 started" in printed
    assert "QaRL [/mlp]-seed1 started" in printed


@pytest.mark.parametrize("lacks", [None, "its report", "its last step", "a report of its last step"])
def test_runs_that_are_complete_with_their_reports_are_said_to_be_and_not_started(qarl, lacks, tmp_path, monkeypatch):
    base = {"run_dir": str(tmp_path), "policy": {"model_init": {}}, "loss_fn": {"objective": "tbpo"}}
    steps = {"device": "cpu", "grpo": {"max_num_steps": 2}, "checkpointing": {"enabled": False}}
    values = base | steps | {"compare": {"seeds": [1], "arms": {"a": {}, "b": {}}}}
    write_yaml(tmp_path / "compare.yaml", literal(values))
    for run in expand_arms(validate(values, LocalConfig, source="test"), "test"):
        run.run_dir.mkdir()
        write_yaml(run.run_dir / "config.yaml", literal(run.model_dump(mode="json", exclude={"compare"})))
        (run.run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        (run.run_dir / "report.html").touch()
        os.utime(run.run_dir / "metrics.jsonl", (100, 100))
    match lacks:
        case "its report":
            (tmp_path / "b-seed1" / "report.html").unlink()
        case "its last step":
            (tmp_path / "b-seed1" / "metrics.jsonl").write_text('{"step": 1}\n')
            os.utime(tmp_path / "b-seed1" / "metrics.jsonl", (100, 100))
        case "a report of its last step":
            os.utime(tmp_path / "b-seed1" / "report.html", (50, 50))
    begun, reported = [], []
    monkeypatch.setattr("qarl_nemo.train.arms.run_arms", lambda runs, _: begun.extend(run.name for run in runs) or [])
    monkeypatch.setattr("qarl_nemo.cli.train._write_report", lambda runs, _: reported.extend(run.name for run in runs))
    code, said = qarl("train", tmp_path / "compare.yaml")
    assert code == 0, said
    assert begun == (["b-seed1"] if lacks else [])
    assert f"a-seed1: already complete, 2 steps in {tmp_path / 'a-seed1'}\n" in said
    assert ("b-seed1: already complete" in said) == (lacks is None)
    # Of a run that lacks its last step this one is not told that it ran.
    assert reported == (["a-seed1"] if lacks == "its last step" else ["a-seed1", "b-seed1"])


def test_each_run_sees_its_own_gpu_and_its_part_of_the_share(started, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv(SHARE, "0.5")
    logs = started(["a", "b", "c", "d"], 4, device="cuda")
    assert [log[1] for log in logs] == [f"threads 1, GPUs {gpu}, share 0.25" for gpu in (3, 5, 3, 5)]


def test_a_run_of_several_gpus_sees_all_of_them(started, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    megatron = {"model_init": {}, "precision": "bfloat16", "megatron_cfg": {"num_gpus": 2}}
    vllm = {"engine": "vllm", "own_gpu": True}
    (log,) = started(["a"], 1, device="cuda", policy=megatron, rollout=vllm)
    assert log[1] == "threads 1, GPUs 3,5,7, share 1.0"


def test_a_gpu_is_free_again_when_its_run_has_ended(started, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    logs = started(["a", "b", "c"], 1, device="cuda")
    assert [log[1].split(", ")[1] for log in logs] == ["GPUs 3"] * 3


def test_runs_that_failed_are_named_with_the_end_of_their_logs_when_the_others_are_done(started, tmp_path):
    with pytest.raises(RuntimeError) as raised:
        started(["broken", "killed", "good"], 1, device="cpu")
    assert "end good-seed1" in started.order
    broken, killed = str(raised.value).split("\nkilled-seed1 ")
    numbers = "".join(f"\n    {number}" for number in range(6, 21))
    assert broken == f"broken-seed1 ended with code 3; its log, {tmp_path}/broken-seed1/log.txt, ends with{numbers}"
    assert killed.startswith("was killed by signal 9; its log, ")


def test_a_comparison_that_is_told_to_end_ends_its_runs(started, tmp_path):
    # A run tells it to end, as a scheduler would, and goes on.
    (tmp_path / "waits-seed1").mkdir()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunToldError, match="interrupted"):
        started(["waits"], 1, device="cpu")
    pid = int((tmp_path / "waits-seed1" / "log.txt").read_text().splitlines()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_text_that_looks_like_a_reference_reaches_a_run_as_it_is(started, tmp_path):
    template = "Use ${x} and ${seed}: {problem}"
    data = {"source": "datasets", "train": {"data_path": "t"}, "validation": {"data_path": "t"}}
    data["train"]["prompt_template"] = data["validation"]["prompt_template"] = template
    started(["a"], 1, device="cpu", data=data)
    read = load_config(tmp_path / "a-seed1" / "arm.yaml", [], LocalConfig)
    assert read.data.train.prompt_template == template
