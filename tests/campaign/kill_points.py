"""Runs `qarl` commands in forks of one warm process, and kills them at any of their file-system calls.

    with QarlServer() as qarl:
        whole = qarl.run(["quantize", source, destination], watch=tmp_path)
        for number in range(1, len(whole.calls) + 1):
            qarl.run(["quantize", source, destination], watch=tmp_path, fault="kill", at=number)

A fork costs milliseconds where a start of Python with torch costs seconds. What Python itself opens, writes, renames
and removes below `watch` is counted; a write counts twice, before it and in its middle. Writers in C++ or Rust
(`torch.save`, safetensors) are not seen, only what happens around them: kill those at random moments.
"""

import builtins
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
# What conversions import, including the model classes that a config.json is checked with.
CHECKPOINTS = ("qarl_nemo.checkpoints", "transformers.models.auto", "transformers.models.qwen3_moe.modeling_qwen3_moe")
KILLED = 137
# The exit code of a command that was ended after its timeout.
LATE = -14
# Calls that change a folder; of two paths the second is the one that changes.
_CALLS = (
    "fsync",
    "ftruncate",
    "link",
    "mkdir",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
)
_FREEING = {"remove", "rename", "replace", "rmdir", "unlink"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit code; negative, the signal that ended it; `LATE`, it took longer than its timeout.
        output: what it printed on both channels.
        calls: the file-system calls below `watch`, as `name path`; empty when it was killed.
        seconds: how long it ran.
    """

    code: int
    output: str
    calls: tuple[str, ...]
    seconds: float


class QarlServer:
    """A process that has imported the program, and runs each command in a fork of itself."""

    def __init__(self, preload: Sequence[str] = CHECKPOINTS) -> None:
        """Start the process.

        Args:
            preload: modules that every command needs; imported once, before the first fork.
        """
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *preload],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        watch: Path,
        fault: str | None = None,
        at: int = 0,
        timeout_s: int = 60,
        folder: Path | None = None,
    ) -> Ended:
        """Run one command.

        Args:
            arguments: `qarl`'s arguments.
            watch: folder whose changes are counted.
            fault: `kill` (as `kill -9`, a write half done), `full` (no space from then on) or `interrupt` (Ctrl-C) at
                a call; `moment`, `kill -9` wherever it is.
            at: number of the call that meets the fault, from 1; of a `moment`, milliseconds.
            timeout_s: after this long the command is ended.
            folder: where it is started; None: where this process is.

        Returns:
            How it ended.
        """
        job = {
            "arguments": [str(part) for part in arguments],
            "watch": str(watch.resolve()),
            "fault": fault,
            "at": at,
            "timeout_s": timeout_s,
            "folder": str(folder or Path.cwd()),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Ended(answer["code"], answer["output"], tuple(answer["calls"]), answer["seconds"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class _Calls:
    """Counts file-system calls below a folder, and makes one of them fail."""

    def __init__(self, watch: str, fault: str | None, at: int) -> None:
        self.names: list[str] = []
        self._watch, self._fault, self._at = watch, fault, at

    def watches(self, path: Any) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        return os.path.abspath(os.fsdecode(path)).startswith(self._watch)

    def meet(self, name: str, path: Any) -> bool:
        """Count a call; returns whether the process must be killed now."""
        self.names.append(f"{name} {path}")
        if self._fault == "full" and len(self.names) >= self._at and name not in _FREEING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), None if name == "write" else str(path))
        if self._fault == "interrupt" and len(self.names) == self._at:
            raise KeyboardInterrupt
        return self._fault == "kill" and len(self.names) == self._at

    def install(self) -> None:
        """Replace functions of `os` and `open`, which pathlib and shutil use, too."""
        for name in _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        calls = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                if calls.meet("write", self.name):
                    os._exit(KILLED)
                if calls.meet("write", self.name):
                    super().write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
                    os._exit(KILLED)
                return super().write(data)

        real_open = io.open

        def counted_open(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not set(mode) & set("wax+") or not calls.watches(file):
                return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if calls.meet("open", file):
                os._exit(KILLED)
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        io.open = builtins.open = counted_open  # type: ignore[assignment]

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = arguments[-1] if name in ("rename", "replace", "link", "symlink") else arguments[0]
            # Paths relative to an open folder are shutil.rmtree's.
            folder = options.get("dir_fd")
            if self.watches(path if folder is None else folder) and self.meet(name, path):
                os._exit(KILLED)
            return function(*arguments, **options)

        return call


def _run_forked(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as counted:
        child = os.fork()
        if child == 0:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os._exit(_call_program(job, counted.fileno()))
        started = time.perf_counter()
        if job["fault"] == "moment":
            # Nobody has waited for the child yet, so its id cannot belong to another process.
            time.sleep(job["at"] / 1000)
            os.kill(child, signal.SIGKILL)
        # The child's own alarm cannot be used, because math-verify sets it.
        watch = threading.Timer(job["timeout_s"], os.kill, (child, signal.SIGKILL))
        watch.start()
        _, status = os.waitpid(child, 0)
        in_time = time.perf_counter() - started < job["timeout_s"]
        watch.cancel()
        watch.join()
        for file in (output, counted):
            file.seek(0)
        names = json.loads(counted.read() or b"[]")
        return {
            "code": os.waitstatus_to_exitcode(status) if in_time else LATE,
            "output": output.read().decode(errors="replace"),
            "calls": names,
            "seconds": time.perf_counter() - started,
        }


def _call_program(job: dict[str, Any], counted: int) -> int:
    from qarl_nemo.cli import main

    sys.argv = ["qarl", *job["arguments"]]
    os.chdir(job["folder"])
    calls = _Calls(job["watch"], job["fault"], job["at"])
    calls.install()
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 as the interpreter does: print it, end with 1
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(counted, json.dumps(calls.names).encode())
    return code


def _serve(preload: Sequence[str]) -> None:
    import shutil  # noqa: F401 before os is changed, since it asks at import what os can do

    for name in ("qarl_nemo.cli", *preload):
        __import__(name)
    jobs, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    for line in jobs:
        answers.write(json.dumps(_run_forked(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1:])
