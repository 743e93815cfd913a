"""What runs on a node for checks and logs. It imports nothing of ours, so a node without our package answers, too."""

import fnmatch
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

# Bytes that tell one log from another: a few of its lines, with their times.
_END = 1024


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Describe this node.

    Args:
        request: `program` (source of `environment.py`), `modules`, `env` (variables the job will set), `worker_envs`
            (patterns), `timeout_s`, and `paths`, `token`, `node_id` for `use_shared_path`.

    Returns:
        `host`, `environments` (one answer for each Python) and `paths` (problems by path).
    """
    env = {**os.environ, **request["env"]}
    pythons = [sys.executable, *worker_pythons(env, request["worker_envs"])]
    return {
        "host": socket.gethostname(),
        "environments": [ask(python, request, env) for python in pythons],
        "paths": {path: use_shared_path(Path(path), request["token"], request["node_id"]) for path in request["paths"]},
    }


def worker_pythons(env: dict[str, str], patterns: list[str]) -> list[str]:
    """Find the interpreters NeMo-RL keeps for its workers.

    Args:
        env: the job's environment. `NEMO_RL_VENV_DIR` is where they are; `NEMO_RL_PY_EXECUTABLES_SYSTEM=1` means there
            are none.
        patterns: patterns of folder names.
    """
    folder = env.get("NEMO_RL_VENV_DIR")
    if not folder or env.get("NEMO_RL_PY_EXECUTABLES_SYSTEM") == "1":
        return []
    found = [
        python
        for python in sorted(Path(folder).glob("*/bin/python"))
        if any(fnmatch.fnmatch(python.parts[-3], each) for each in patterns)
    ]
    # Several workers may share an environment through links to it.
    return list({python.parents[1].resolve(): str(python) for python in found}.values())


def ask(python: str, request: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Run `environment.py` in one interpreter.

    Args:
        python: the interpreter's path.
        request: see `look`.
        env: the process's environment.

    Returns:
        What it printed; if it failed, the same keys with the reason under `problems`.
    """
    command = [python, "-c", request["program"], *request["modules"]]
    answer = {"python": python, "versions": {}, "packages": {}}
    try:
        # Run in `/`, because `-c` imports from the working directory first, and workers do not.
        done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=request["timeout_s"], check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**answer, "problems": [f"{python} did not answer: {error}"]}
    try:
        return {**answer, **json.loads(done.stdout.splitlines()[-1])}
    except (IndexError, ValueError):
        return {**answer, "problems": [f"{python} did not answer: {done.stderr.strip()[-400:]}"]}


def use_shared_path(folder: Path, token: str, node_id: str) -> list[str]:
    """Read what the head wrote into a folder, and write there as checkpoints are written: under another name, renamed.

    Args:
        folder: a folder that all nodes should share.
        token: the name of the head's file, and its content.
        node_id: the name of this node's file, which the head looks for.

    Returns:
        What is wrong; empty if nothing is.
    """
    problems = []
    try:
        if (folder / token).read_text() != token:
            problems.append("holds another file than the head wrote")
    except OSError as error:
        problems.append(f"does not show the file the head wrote there, so it is not shared ({error.strerror})")
    try:
        unfinished = folder / f"{token}.{node_id}.tmp"
        unfinished.write_text(node_id)
        unfinished.rename(folder / f"{token}.{node_id}")
    except OSError as error:
        problems.append(f"cannot be written ({error.strerror})")
    return problems


def copy_logs(source: str, target: str) -> int:
    """Bring a copy of a log folder up to date: what has grown is appended, another is copied anew.

    Args:
        source: a folder; only plain files are read. One that is rotated away meanwhile is left as it was copied last.
        target: its copy, made if it is missing.

    Returns:
        Bytes written.
    """
    written = 0
    for path in sorted(Path(source).rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        copy = Path(target) / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            new = path.open("rb")
        except FileNotFoundError:
            continue
        copy.touch()
        with new, copy.open("r+b") as old:
            had = old.seek(0, os.SEEK_END)
            if not _continues(new, old, had):
                had = old.truncate(0)
            new.seek(had)
            old.seek(had)
            shutil.copyfileobj(new, old)
            written += old.tell() - had
    return written


def _continues(new: BinaryIO, old: BinaryIO, had: int) -> bool:
    """Tell by both ends of a copy whether a log begins with it; a rotation gives its name to another, maybe longer."""
    for place in (0, max(0, had - _END)):
        old.seek(place)
        new.seek(place)
        end = old.read(_END)
        if new.read(len(end)) != end:
            return False
    return True


def copy_ray_logs(target: str) -> int:
    """Bring the copy of this node's Ray logs in a folder up to date; return the bytes written."""
    import ray._private.worker as ray_worker  # Ray offers no public way to ask where its logs are

    return copy_logs(ray_worker.global_worker.node.get_logs_dir_path(), target)
