"""What a node answers, and what the head makes of the answers; no Ray."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from qarl_nemo.cluster import environment, on_node

TOKEN = ".qarl-check-1"


def package(folder: Path, version: str, body: str = "") -> Path:
    made = folder / "qarl_nemo"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(f'__version__ = "{version}"\n{body}')
    return folder


def request(**changes):
    common = {"modules": ["qarl_nemo"], "env": {}, "worker_envs": ["*Worker"], "timeout_s": 60, "paths": []}
    program = Path(environment.__file__).read_text()
    return {"program": program, "token": TOKEN, "node_id": "n", **common, **changes}


def test_a_node_says_what_it_imports_from_where(tmp_path):
    folder = package(tmp_path / "site", "9.9")
    (answer,) = on_node.look(request(env={"PYTHONPATH": str(folder)}))["environments"]
    found = answer["packages"]["qarl_nemo"]
    assert (found["version"], found["folder"]) == ("9.9", str(folder / "qarl_nemo"))
    assert answer["problems"] == []
    assert answer["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_package_that_does_not_import_is_a_problem_with_its_reason(tmp_path):
    folder = package(tmp_path / "site", "9.9", "import no_such_dependency\n")
    (answer,) = on_node.look(request(env={"PYTHONPATH": str(folder)}))["environments"]
    assert answer["problems"] == ["cannot import qarl_nemo: ModuleNotFoundError: No module named 'no_such_dependency'"]


def test_sources_of_one_version_that_differ_have_other_digests(tmp_path):
    one, two, same = (package(tmp_path / name, "1", body) for name, body in (("a", ""), ("b", "x = 1\n"), ("c", "")))
    digests = [environment.digest(folder / "qarl_nemo") for folder in (one, two, same)]
    assert digests[0] == digests[2] != digests[1]


def test_worker_environments_are_found_unless_nemo_rl_was_told_to_use_one(tmp_path):
    for name in ("a.VllmWorker", "a.MegatronWorker", "a.Other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    # A link to an environment's Python from outside it does not find that environment's packages.
    env = {"NEMO_RL_VENV_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = on_node.worker_pythons(env, ["*Worker"])
    assert [Path(python).parts[-3] for python in found] == ["a.MegatronWorker", "a.VllmWorker"]
    assert on_node.worker_pythons({**env, "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}, ["*Worker"]) == []
    assert on_node.worker_pythons({}, ["*Worker"]) == []
    answers = on_node.look(request(env=env))["environments"]
    assert [answer["problems"] for answer in answers] == [[], [], []]


@pytest.mark.parametrize(("body", "says"), [("exit 1", "did not answer"), ("echo no json", "did not answer")])
def test_an_interpreter_that_does_not_answer_is_a_problem(tmp_path, body, says):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    assert says in on_node.ask(str(python), request(), dict(os.environ))["problems"][0]
    assert says in on_node.ask(str(tmp_path / "absent"), request(), dict(os.environ))["problems"][0]


def test_a_shared_folder_passes_and_shows_the_nodes_file_to_the_head(tmp_path):
    (tmp_path / TOKEN).write_text(TOKEN)
    assert on_node.use_shared_path(tmp_path, TOKEN, "n") == []
    assert (tmp_path / f"{TOKEN}.n").read_text() == "n"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_of_the_nodes_own_is_not_shared(tmp_path):
    (problem,) = on_node.use_shared_path(tmp_path, TOKEN, "n")
    assert "so it is not shared" in problem


def test_a_folder_that_cannot_be_written_is_told_from_one_that_is_not_shared(tmp_path):
    """A node on which the folder is a file can do neither; root writes everywhere else."""
    (tmp_path / "file").touch()
    problems = on_node.use_shared_path(tmp_path / "file", TOKEN, "n")
    assert [problem.split(" (")[0] for problem in problems] == [
        "does not show the file the head wrote there, so it is not shared",
        "cannot be written",
    ]


def test_logs_are_appended_and_a_log_that_shrank_is_copied_anew(tmp_path):
    source, target = tmp_path / "logs", tmp_path / "copy"
    (source / "old").mkdir(parents=True)
    log = source / "raylet.out"
    log.write_text("one\n")
    (source / "old" / "gcs.log").write_text("gcs\n")
    (source / "link").symlink_to(log)
    assert on_node.copy_logs(str(source), str(target)) == 8
    with log.open("a") as file:
        file.write("two\n")
    assert on_node.copy_logs(str(source), str(target)) == 4
    assert (target / "raylet.out").read_text() == "one\ntwo\n"
    log.write_text("new\n")
    assert on_node.copy_logs(str(source), str(target)) == 4
    assert (target / "raylet.out").read_text() == "new\n"
    assert not (target / "link").exists()


@pytest.mark.parametrize("named", ["raylet.out.{}", "raylet.{}.out"])
@pytest.mark.parametrize("same", ["begin", "end"])
def test_logs_keep_every_line_over_rotations(tmp_path, named, same):
    source, target = tmp_path / "logs", tmp_path / "copy"
    names = ["raylet.out", *(named.format(number) for number in (1, 2, 3))]
    source.mkdir()
    for number in range(4):
        for newer, older in reversed(list(pairwise(names))):
            if (source / newer).exists():
                (source / newer).rename(source / older)
        own, line = f"chunk {number}\n" * 10, "the same line\n" * 300
        # Each is larger than the last, so that its size does not tell.
        (source / "raylet.out").write_text((line + own if same == "begin" else own + line) + "more\n" * number)
        on_node.copy_logs(str(source), str(target))
        assert {file.name: file.read_text() for file in target.iterdir()} == {
            file.name: file.read_text() for file in source.iterdir()
        }
    assert on_node.copy_logs(str(source), str(target)) == 0


def test_a_log_that_is_rotated_away_while_others_are_copied_leaves_its_copy(tmp_path, monkeypatch):
    source, target = tmp_path / "logs", tmp_path / "copy"
    source.mkdir()
    for name in ("a.out", "b.out"):
        (source / name).write_text("one\n")
    on_node.copy_logs(str(source), str(target))
    (source / "b.out").write_text("one\ntwo\n")
    was_there, gone = Path.is_file, source / "a.out"
    gone.unlink()
    monkeypatch.setattr(Path, "rglob", lambda *_: iter([gone, source / "b.out"]))
    monkeypatch.setattr(Path, "is_file", lambda path: path == gone or was_there(path))
    assert on_node.copy_logs(str(source), str(target)) == 4
    assert (target / "a.out").read_text() == "one\n"


def test_the_environments_program_needs_nothing_installed():
    """`-I -S`: no site-packages, no PYTHONPATH."""
    source = Path(environment.__file__).read_text()
    command = [sys.executable, "-I", "-S", "-c", source, "json", "no_such_module"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert list(answer["packages"]) == ["json"]
    assert answer["problems"] == ["cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"]
