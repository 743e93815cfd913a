"""The harness of whole steps under wrong commands and damaged logs: no row says what nobody ran."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.tensorboard import SummaryWriter

from qarl_nemo.metrics.results import read_results
from support.full_size import MODEL, write_run

ENDS = (1000.0, 1022.0, 1044.0)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def harness(tools):
    tools("bench/full_size")


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Call run.py on a host of two GPUs; returns what it refuses."""
    import arms
    import refusals
    import run

    recipe = tmp_path / "nemo_rl" / arms.OWN_RECIPE
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    monkeypatch.setattr(refusals, "num_gpus", lambda: 2)
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))

    def call(*words):
        own = ["run.py", str(tmp_path / "work"), "--nemo-rl", str(tmp_path / "nemo_rl"), "--workload", "a24", *words]
        monkeypatch.setattr(sys, "argv", own)
        try:
            assert run.main() == 0
        except SystemExit as ended:
            return str(ended.code) + capsys.readouterr().err
        return ""

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "grpo={num_prompts_per_step: 3}"], "--set grpo: "),
        (["--set", "++policy.hf_config_overrides.num_hidden_layers=4"], "--set policy.hf_config_overrides."),
        (["--set", "policy.model_name=other"], "--set policy.model_name: "),
        (["--set", "policy.generation.colocated.enabled=false"], "--set policy.generation.colocated.enabled: "),
        (["--set", "~grpo.async_grpo"], "--set grpo.async_grpo: "),
        (["--set", "grpo.max_num_steps=9"], "--set grpo.max_num_steps: "),
        (["--set", "logger.log_dir=there"], "--set logger.log_dir: "),
        (["--arm", "nemo_rl", "--label", "best"], "--label best: an arm or a placement is called so"),
        (["--label", "separate_1_1"], "--label separate_1_1: an arm or a placement is called so"),
        (["--cap-gib", "8"], "--cap-gib 8: "),
        (["--cap-gib", "nan"], "--cap-gib nan: "),
        (["--profile", "0"], "--profile 0: the run has steps 1 to 4"),
        (["--profile", "5"], "--profile 5: the run has steps 1 to 4"),
        (["--placement", "separate_01_1"], "placement 'separate_01_1'; legal: "),
    ],
)
def test_what_would_be_recorded_as_something_else_is_refused(command, tmp_path, words, said):
    assert said in command(*words, "--check")
    assert not (tmp_path / "work").exists()


def test_rows_of_another_model_have_a_label(command, tmp_path):
    other = tmp_path / "config.json"
    shutil.copy(MODEL / "config.json", other)
    assert "--label" in command("--config", str(other), "--check")
    assert command("--config", str(other), "--label", "other", "--check") == ""


def test_a_run_is_not_mixed_with_another(command, tmp_path):
    arm = tmp_path / "work" / "a24" / "w4a16"
    write_run(arm, ends=ENDS)
    before = (arm / "facts.json").read_text()
    # A check leaves what a run wrote alone, and a second run does not add its logs to the first one's.
    assert command("--check", "--set", "policy.train_micro_batch_size=2") == ""
    assert (arm / "facts.json").read_text() == before
    assert f"{arm} holds a run" in command("--arm", "w4a16")
    assert (arm / "facts.json").read_text() == before


def test_an_incomplete_nemo_rl_is_refused(command):
    assert "has no nemo_rl, megatron/core, megatron/bridge" in (said := command())
    assert "Traceback" not in said


def test_the_command_of_a_row_runs_the_same_again(command, monkeypatch, tmp_path):
    import run

    monkeypatch.setenv("QARL_DECODE_LINEAR", "1")

    words = ["--steps", "6", "--profile", "5", "--cap-gib", "79", "--label", "other"]
    other = tmp_path / "config.json"
    shutil.copy(MODEL / "config.json", other)
    said = []
    original = run._command_line
    run._command_line = lambda *arguments: said.append(original(*arguments)) or said[-1]
    assert command(*words, "--config", str(other), "--arm", "w4a16", "--arm", "w4a16", "--check") == ""
    run._command_line = original
    assert len(said) == 1
    for word in (*words, "--config"):
        assert word in said[0].split()
    assert said[0].startswith("QARL_DECODE_LINEAR=1 python tools/bench/full_size/run.py WORK ")


def test_the_gpus_of_a_job_are_watched(monkeypatch):
    import host_memory

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        NVMLError=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for visible, handles in ((None, [0, 1, 2, 3]), ("2,3", [2, 3]), ("GPU-5,0", ["GPU-5", 0]), ("", [])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert host_memory.visible_gpus() == handles
        assert host_memory.num_gpus() == len(handles)


@pytest.fixture
def record(monkeypatch, tmp_path, capsys):
    """Call record.py; returns what it refuses."""
    import record

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["record.py", *map(str, words), "--record", str(tmp_path / "rows.json")])
        try:
            record.main()
        except SystemExit:
            return capsys.readouterr().err
        return ""

    return call


def ran(folder, **facts):
    write_run(folder, ends=ENDS, **facts)
    found = {"hardware": "H200", "versions": {}}
    (folder / "logs" / "exp_001" / "run.json").write_text(json.dumps(found))
    return folder


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("facts.json", '{"arm": "w4a16"}', "facts.json: it lacks workload, placement, command"),
        ("facts.json", '{"arm": "w", "workload": "a25", "placement": "colocated", "command": ""}', "workload 'a25'"),
        ("logs/exp_001/run.json", "{}", "run.json: it lacks hardware, versions"),
        ("memory.csv", "", "memory.csv: nothing was watched"),
        ("memory.csv", "time_s,host_gib\n", "memory.csv: nothing was watched"),
        ("memory.csv", "time_s,host_gib\n1,x\n2,3\n", "memory.csv, line 2"),
        ("memory.csv", "time_s,host_gib\n2000,1\n2001,1\n", "memory.csv begins after the first step"),
        ("memory.csv", None, "memory.csv: expected"),
    ],
)
def test_damaged_logs_are_named(record, tmp_path, file, content, said):
    damaged = ran(tmp_path / "arm") / file
    damaged.unlink()
    if content is not None:
        damaged.write_text(content)
    assert said in record(tmp_path / "arm")
    assert not (tmp_path / "rows.json").exists()


def test_a_last_second_that_was_cut_costs_no_row(record, tmp_path):
    watched = ran(tmp_path / "arm") / "memory.csv"
    watched.write_text(watched.read_text() + "1100.0,4")
    assert record(tmp_path / "arm") == ""


def test_an_arm_is_not_compared_with_itself(record, tmp_path):
    one, two = ran(tmp_path / "one", workload="a12_1gpu"), ran(tmp_path / "two", workload="a12_2gpu")
    assert "is compared with itself" in record(two, "--over", two)
    assert "as much work a GPU" in record(two, "--scaling-from", two)
    assert "as much work a GPU" in record(one, "--scaling-from", two)


def test_each_arm_has_its_own_row_of_what_more_gpus_leave(record, tmp_path):
    for arm in ("w4a16", "bf16"):
        one, two = (ran(tmp_path / f"{arm}_{work}", workload=work, arm=arm) for work in ("a12_1gpu", "a12_2gpu"))
        assert record(two, "--scaling-from", one) == ""
    names = {row.name for row in read_results(tmp_path / "rows.json") if "scaling" in row.name}
    assert names == {f"full_scaling_efficiency_from_1gpu_{arm}_a12_2gpu" for arm in ("w4a16", "bf16")}


def test_steps_that_differ_are_said(record, tmp_path, capsys):
    assert record(ran(tmp_path / "steady")) == ""
    assert "hint" not in capsys.readouterr().out
    assert record(ran(tmp_path / "slowing", seconds=(22.0, 22.0, 30.0))) == ""
    assert "hint: steps took 22.0, 30.0 s" in capsys.readouterr().out


def test_a_step_that_a_run_died_in_does_not_count(record, tmp_path):
    # As a batch's lengths are logged before its update.
    writer = SummaryWriter(log_dir=str(ran(tmp_path / "arm") / "logs" / "exp_001" / "tensorboard"))
    writer.add_scalar("train/mean_gen_tokens_per_sample", 100.0, len(ENDS) + 1, walltime=ENDS[-1] + 9)
    writer.close()
    assert record(tmp_path / "arm") == ""
    assert "--skip leaves none to count" in record(tmp_path / "arm", "--skip", "2,3")


def test_the_first_step_never_counts(record, tmp_path):
    assert record(ran(tmp_path / "arm"), "--skip", "3") == ""
    assert "--skip leaves none to count" in record(tmp_path / "arm", "--skip", "2,3")
    assert "--skip: 'last' is not" in record(tmp_path / "arm", "--skip", "last")


def test_no_bar_of_what_is_recorded_hides_another():
    import phase_bars
    from workloads import WORKLOADS

    rows = json.loads((ROOT / "docs" / "results" / "full_size.json").read_text())
    values = {row["name"]: row["value"] for row in rows}
    for workload in WORKLOADS:
        assert len(phase_bars.labelled(values, [workload])) == len(phase_bars.phase_bars(values, workload))


@pytest.mark.parametrize(
    ("results", "figure", "more", "said"),
    [
        ("nothing.json", "bars.png", [], "nothing.json: expected a JSON list of results"),
        ("docs/results/full_size.json", "/proc/nowhere/bars.png", [], "/proc/nowhere/bars.png: no such file"),
        ("docs/results/full_size.json", "bars.txt", [], "bars.txt: Format 'txt' is not supported"),
        ("docs/results/house.json", "bars.png", [], "house.json has no full_step_s_..._a24"),
        ("docs/results/full_size.json", "bars.png", ["--without", "w4a17"], "--without w4a17: there are"),
        ("docs/results/full_size.json", "bars.png", ["--only", "w4a17"], "--only w4a17: there are"),
    ],
)
def test_bars_that_cannot_be_drawn_are_one_line(monkeypatch, capsys, tmp_path, results, figure, more, said):
    import phase_bars

    words = [str(ROOT / results), str(tmp_path / figure), "--workload", "a24", *more]
    monkeypatch.setattr(sys, "argv", ["phase_bars.py", *words])
    with pytest.raises(SystemExit) as ended:
        phase_bars.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


STUBBED = """
import contextlib, runpy, sys
sys.path.insert(0, {folder!r})
import host_memory, model, refusals, tree
host_memory.recorded_memory = lambda *_: contextlib.nullcontext()
model.make_model, refusals.num_gpus = (lambda *_, **__: None), (lambda: 2)
tree.copy_tree = lambda root, copy: copy
sys.executable = {launcher!r}
sys.argv = ["run.py", {work!r}, "--nemo-rl", {root!r}, "--workload", "a24"]
runpy.run_path({folder!r} + "/run.py", run_name="__main__")
"""


def test_a_run_that_is_ended_ends_its_launcher(tmp_path):
    import arms

    recipe, launcher = tmp_path / arms.OWN_RECIPE, tmp_path / "launcher"
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    (tmp_path / "pid").touch()
    launcher.write_text(f"#!/bin/bash\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    launcher.chmod(0o755)
    paths = {"folder": str(ROOT / "tools/bench/full_size"), "launcher": str(launcher), "work": str(tmp_path / "work")}
    run = subprocess.Popen([sys.executable, "-c", STUBBED.format(root=str(tmp_path), **paths)])
    while run.poll() is None and not (tmp_path / "pid").read_text():
        time.sleep(0.1)
    run.terminate()
    run.wait(60)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
