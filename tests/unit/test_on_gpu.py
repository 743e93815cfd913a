"""Lists of GPU jobs: they name what exists, start beside each other as memory allows, and end with the time."""

import json
import os
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from qarl_nemo.config import load_config
from qarl_nemo.train.arms import expand_arms, select_arms
from qarl_nemo.train.config import LocalConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tools" / "on_gpu"
LISTS = ("tests.yaml", *(f"waiting/{name}.yaml" for name in ("whole_steps", "engines", "real_model")))


@pytest.fixture
def on_gpu(tools):
    tools("on_gpu")
    import jobs
    import run
    import schedule

    return jobs, run, schedule


@pytest.fixture
def started(on_gpu, monkeypatch, tmp_path):
    """Run jobs on two GPUs of 100 GiB that nobody has; returns the exit code, what became of them and their logs."""
    _, run, schedule = on_gpu

    def start(*jobs, limit_s="60", host_gib=1000.0):
        defaults = {"why": "because", "memory_gib": 60, "seconds": 1}
        path = tmp_path / "list.yaml"
        path.write_text(yaml.safe_dump({"jobs": [defaults | job for job in jobs]}))
        monkeypatch.setattr(run, "find_gpus", lambda: [schedule.Gpu(index, 100.0) for index in (0, 1)])
        monkeypatch.setattr(run, "first_host_gib", lambda: host_gib)
        monkeypatch.setattr(sys, "argv", ["run.py", str(path), "--out", str(tmp_path / "out"), "--limit-s", limit_s])
        code = run.main()
        rows = json.loads((tmp_path / "out" / "jobs.json").read_text())
        return code, {row["name"]: row["state"] for row in rows}, tmp_path / "out"

    return start


def test_jobs_run_on_gpus_with_room_and_failures_are_told(started):
    show = "echo on $CUDA_VISIBLE_DEVICES"
    code, states, out = started({"name": "a", "run": show}, {"name": "b", "run": show}, {"name": "c", "run": "exit 3"})
    assert code == 1
    assert states == {"a": "passed", "b": "passed", "c": "failed"}
    assert {(out / f"{name}.txt").read_text() for name in "ab"} == {"on 0\n", "on 1\n"}


@pytest.mark.parametrize(("far", "deaf"), [("", "trap '' TERM; "), ("setsid ", ""), ("setsid setsid ", "")])
def test_a_job_leaves_nothing_on_its_gpus(started, tmp_path, far, deaf):
    # Neither where it ended before its workers did, nor where it was stopped and they do not answer, nor it; wherever
    # they went, as engines of tests have sessions of their own.
    worker = f"""{far}bash -c "trap '' TERM; echo \\$\\$ > {tmp_path}/%s; exec sleep 600" &"""
    ends, stays = (f"{worker % name} until [ -s {tmp_path}/{name} ]; do sleep 0.1; done" for name in ("ends", "stays"))
    _, states, _ = started(
        {"name": "ends", "run": ends}, {"name": "stays", "run": f"{deaf}{stays}; sleep 600"}, limit_s="4"
    )
    assert states == {"ends": "passed", "stays": "cut"}
    for name in states:
        assert not psutil.pid_exists(int((tmp_path / name).read_text()))


def test_jobs_that_are_late_are_all_told_before_one_is_waited_for(started, tmp_path):
    def job(own, other):
        told = f"touch {tmp_path}/{own}; until [ -e {tmp_path}/{other} ]; do sleep 0.1; done; echo both; exit 1"
        return {"name": own, "run": f"trap '{told}' TERM; while true; do sleep 0.1; done"}

    _, states, out = started(job("a", "b"), job("b", "a"), limit_s="2")
    assert states == {"a": "cut", "b": "cut"}
    for name in states:
        assert (out / f"{name}.txt").read_text().endswith("both\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--select", "("], "--select '(' is no pattern"),
        (["--side-by-side", "0"], "--side-by-side 0: set 1 or more"),
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_wrong_options_start_nothing(on_gpu, monkeypatch, capsys, words, said):
    _, run, schedule = on_gpu
    monkeypatch.setattr(run, "find_gpus", lambda: [schedule.Gpu(0, 100.0)])
    monkeypatch.setattr(run, "_problems", lambda *_: [])
    monkeypatch.setattr(run.subprocess, "Popen", lambda *_, **__: pytest.fail("a job was started"))
    monkeypatch.setattr(sys, "argv", ["run.py", str(FOLDER / "tests.yaml"), "--limit-s", "1", *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_does_not_fit_into_the_time_is_not_started_and_what_runs_then_is_stopped(started):
    code, states, _ = started(
        {"name": "late", "run": "sleep 60", "seconds": 0.1}, {"name": "long", "run": "true", "seconds": 9}, limit_s="1"
    )
    assert code == 1
    assert states == {"late": "cut", "long": "no time"}


def test_a_job_stands_for_one_with_each_choice(started):
    each = {"arm": ["QaRL w4a16, GSPO", "b"], "seed": [1, 2]}
    code, states, out = started({"name": "a", "run": "echo '{arm}' {seed} $QARL_GPU_SHARE", "each": each})
    assert code == 0
    assert list(states) == ["a.qarl_w4a16_gspo.1", "a.qarl_w4a16_gspo.2", "a.b.1", "a.b.2"]
    # Neighbours count on what is left of a GPU of 100 GiB.
    assert (out / "a.qarl_w4a16_gspo.2.txt").read_text() == "QaRL w4a16, GSPO 2 0.6\n"


def test_commands_share_texts(on_gpu, tmp_path):
    jobs, _, _ = on_gpu
    job = {"name": "a", "why": "w", "run": "echo {both} {arm}", "memory_gib": 1, "seconds": 1, "each": {"arm": ["x"]}}
    path = tmp_path / "texts.yaml"
    path.write_text(yaml.safe_dump({"texts": {"one": "1", "both": "{one} 2"}, "jobs": [job]}, sort_keys=False))
    assert [found.run for found in jobs.read_jobs(path)] == ["echo 1 2 x"]


def test_a_job_that_is_alone_is_no_client_of_the_others_service(started):
    show = "echo ${QARL_GPU_SHARE} $(printenv CUDA_MPS_PIPE_DIRECTORY)"
    code, _, out = started({"name": "a", "run": show, "alone": True})
    assert code == 0
    assert (out / "a.txt").read_text() == f"1.0 {out / 'no_mps'}\n"


def test_jobs_start_as_far_as_the_hosts_memory_goes(started, capsys, tmp_path):
    # Each has a GPU of its own, and the host holds one of them at a time.
    run = f"mkdir {tmp_path}/here && sleep 0.5 && rmdir {tmp_path}/here"
    jobs = [{"name": name, "run": run, "host_gib": 60} for name in "ab"]
    assert started(*jobs, host_gib=100.0)[:2] == (0, {"a": "passed", "b": "passed"})
    with pytest.raises(SystemExit):
        started(*jobs, {"name": "c", "run": "true"}, host_gib=50.0)
    said = capsys.readouterr().err
    assert "the host has 50 GiB of memory, and more is computed for a (60), b (60): --select others" in said


def test_a_job_that_waits_for_the_hosts_memory_is_not_overtaken(on_gpu):
    jobs, _, schedule = on_gpu
    large, small = (
        jobs.Job(name=name, why="w", run="r", memory_gib=10, seconds=1, host_gib=host)
        for name, host in (("large", 60), ("small", 0))
    )
    gpus = [schedule.Gpu(index, 100.0) for index in range(2)]
    assert schedule.next_job([large, small], gpus, [large], 100.0) is None
    assert schedule.next_job([large, small], gpus, [small], 100.0) == (large, [gpus[0]])
    # What nobody can measure holds nothing back.
    assert schedule.next_job([large], gpus, [large]) == (large, [gpus[0]])


def test_a_job_that_wants_gpus_alone_is_not_overtaken_on_them(on_gpu):
    jobs, _, schedule = on_gpu

    def job(name, **settings):
        return jobs.Job(**{"name": name, "why": "w", "run": "r", "memory_gib": 10, "seconds": 1} | settings)

    busy, both, small, same, other = (
        job("busy", one_of="port"),
        job("both", gpus=2, alone=True),
        job("small"),
        job("same", one_of="port"),
        job("alone", alone=True),
    )
    gpus = [schedule.Gpu(0, 100.0, [busy]), schedule.Gpu(1, 100.0)]
    assert schedule.next_job([both, small], gpus, [busy]) is None
    assert schedule.next_job([same, other], gpus, [busy]) == (other, [gpus[1]])
    assert schedule.next_job([small], gpus, [busy]) == (small, [gpus[1]])
    assert schedule.next_job([job("large", memory_gib=95)], gpus[:1], [busy]) is None
    assert schedule.next_job([small], [schedule.Gpu(0, 100.0, [other])], [other]) is None


def test_a_job_that_wants_the_host_shares_it_with_nobody(on_gpu):
    jobs, _, schedule = on_gpu
    small, whole = (
        jobs.Job(name=name, why="w", run="r", memory_gib=10, seconds=1, alone=alone)
        for name, alone in (("small", False), ("whole", "host"))
    )
    gpus = [schedule.Gpu(index, 100.0) for index in range(4)]
    assert schedule.next_job([whole, small], gpus, []) == (whole, [gpus[0]])
    # Nothing overtakes it while it waits, and nothing starts beside it.
    assert schedule.next_job([whole, small], gpus, [small]) is None
    assert schedule.next_job([small], gpus, [whole]) is None


def test_whole_steps_have_the_host_whose_memory_and_files_they_write(on_gpu):
    jobs, _, _ = on_gpu
    steps = [job for name in LISTS for job in jobs.read_jobs(FOLDER / name) if "full_size/run.py" in job.run]
    assert len(steps) > 10
    assert {job.alone for job in steps} == {"host"}


def test_whole_steps_have_labels_that_rows_can_end_in(on_gpu):
    jobs, *_ = on_gpu
    steps = [job.run for job in jobs.read_jobs(FOLDER / "waiting" / "whole_steps.yaml")]
    labels = [label for run in steps for label in re.findall(r"--label (\S+)", run)]
    assert len(labels) > 5
    assert [label for label in labels if not re.fullmatch("[a-z0-9_]+", label)] == []


def test_wrong_lists_are_refused_with_every_reason(on_gpu, tmp_path):
    jobs, run, schedule = on_gpu
    command = "export QARL_OWN=1 && echo $QARL_OWN $QARL_NO_SUCH ${QARL_NOR_THIS}"
    job = {"name": "a", "why": "w", "run": command, "memory_gib": 200, "seconds": 1}
    path = tmp_path / "list.yaml"
    path.write_text(yaml.safe_dump({"jobs": [job, job]}))
    with pytest.raises(ValueError, match="two jobs are called a"):
        jobs.read_jobs(path)
    path.write_text(yaml.safe_dump({"jobs": [job | {"each": {"arm": ["x"], "seed": [1]}}]}))
    with pytest.raises(ValueError, match=r"run has no \{arm\}, \{seed\} for what `each` lists"):
        jobs.read_jobs(path)
    path.write_text(yaml.safe_dump({"texts": {"given": "$HOME"}, "jobs": [job | {"run": "ls {given} {seed}/${A}"}]}))
    with pytest.raises(ValueError, match=r"nothing says what \{seed\} \(a\) stands for: add it to `texts`"):
        jobs.read_jobs(path)
    path.write_text(yaml.safe_dump({"jobs": [job]}))
    with pytest.raises(ValueError, match="no job's name matches 'b'; there are a"):
        jobs.read_jobs(path, "b")
    problems = " ".join(run._problems(jobs.read_jobs(path), [schedule.Gpu(0, 100.0)], 1000.0))
    assert "commands read QARL_NOR_THIS, QARL_NO_SUCH: set" in problems
    assert "no room for a" in problems


def test_variables_that_bash_or_a_command_provides_are_none_that_lack(on_gpu):
    jobs, *_ = on_gpu
    run = """for QARL_N in 1 2; do echo $QARL_N ${QARL_OR:-none}${QARL_OR-} $RANDOM $UID ${QARL_A:=$QARL_B}; done
    (QARL_C=1; echo $QARL_C ${PIPESTATUS[0]}); true;QARL_D=1; echo $QARL_D-1 $QARL_E-1 ${QARL_F:?why} ${QARL_G:1}"""
    job = jobs.Job(name="a", why="w", run=run, memory_gib=1, seconds=1)
    assert jobs.unset_variables([job]) == ["QARL_B", "QARL_E", "QARL_F", "QARL_G"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 3]), ("1", [1]), (" 3, 0", [0, 3]), ("GPU-b1,3", [1, 3]), ("2", []), ("-1", []), ("", [])],
)
def test_jobs_take_gpus_that_the_caller_sees_and_whose_memory_is_known(on_gpu, monkeypatch, tmp_path, visible, indices):
    _, run, _ = on_gpu
    rows = ["0, GPU-a0-7, 81920", "1, GPU-b1-7, 40960", "2, GPU-c2-7, [N/A]", "3, GPU-d3-7, 81920"]
    nvidia_smi(tmp_path, monkeypatch, *rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpus = run.find_gpus()
    assert [gpu.index for gpu in gpus] == indices
    assert [gpu.memory_gib for gpu in gpus if gpu.index == 1] == [40.0] * (1 in indices)
    if not gpus:
        (problem,) = run._problems([], gpus, 1.0)
        assert f"CUDA_VISIBLE_DEVICES={visible!r}" in problem


def test_a_host_whose_driver_finds_no_gpu_is_refused(on_gpu, monkeypatch, tmp_path):
    _, run, _ = on_gpu
    nvidia_smi(tmp_path, monkeypatch, "No devices were found")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run._problems([], run.find_gpus(), 1.0) == ["nvidia-smi lists no GPU with its memory on this host"]


def nvidia_smi(folder, monkeypatch, *lines):
    """Put a program before the driver's that lists these."""
    program = folder / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), ""]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize("name", LISTS)
def test_every_command_of_a_list_names_files_that_exist(name, on_gpu):
    jobs, _, _ = on_gpu
    for job in jobs.read_jobs(FOLDER / name):
        files = re.findall(r"(?:tests|tools|examples|kernels)/[\w./-]+", job.run)
        assert files or "qarl compare" in job.run, job.name
        assert [file for file in files if not (ROOT / file).exists() and not file.startswith("docs")] == [], job.name


def test_every_comparison_of_a_list_names_arms_and_settings_that_exist(on_gpu):
    jobs, _, _ = on_gpu
    words = [shlex.split(job.run) for name in LISTS for job in jobs.read_jobs(FOLDER / name) if "qarl train" in job.run]
    assert len(words) > 30
    for _, _, config, *rest in words:
        arms = [value for option, value in pairwise(rest) if option == "--arm"]
        overrides = [word for word in rest if re.match(r"[a-z_.]+=", word)]
        select_arms(expand_arms(load_config(ROOT / config, overrides, LocalConfig), config), arms)


def test_every_gpu_test_is_in_the_list(on_gpu):
    jobs, _, _ = on_gpu
    listed = " ".join(job.run for job in jobs.read_jobs(FOLDER / "tests.yaml"))
    folders = [part for part in listed.split() if part.startswith("tests/")]
    marked = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu", path.read_text(encoding="utf-8"))
    ]
    assert len(marked) > 20
    assert [
        path for path in marked if not any(path == one or path.startswith(f"{one}{os.sep}") for one in folders)
    ] == []
