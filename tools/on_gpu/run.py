"""Run a list of tests and measurements on this host's GPUs, several side by side, the most wanted first.

    python tools/on_gpu/run.py tools/on_gpu/tests.yaml
    python tools/on_gpu/run.py tools/on_gpu/waiting/whole_steps.yaml --select "^full_" --limit-s 1500 --out runs/on_gpu

A job starts as soon as its GPUs and the host have the memory that it needs. None starts that would not end within the
limit by its own estimate, and what still runs then is stopped. A job ends with all that it started (`supervise.py`).
OUT gets a log a job, and `jobs.json` whenever a job ends.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from jobs import Job, read_jobs, unset_variables
from schedule import Gpu, next_job
from supervise import GRACE_S

from qarl_nemo.config import ConfigError
from qarl_nemo.files import FileError, make_folder, write_atomic
from qarl_nemo.nemo_rl.layout_memory import first_host_gib
from qarl_nemo.train.gpu_pool import SHARE

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"(\d+), (\S+), ([\d.]+)\s*")
_SUPERVISE = Path(__file__).with_name("supervise.py")


@dataclass
class _Running:
    job: Job
    gpus: list[Gpu]
    process: subprocess.Popen
    start: float


class Host:
    """Runs jobs until none is left that fits into the time.

    Args:
        gpus: those to use.
        out: folder of logs.
        host_gib: the host's memory.
        limit_s: from now on.
        side_by_side: jobs at once.
    """

    def __init__(self, gpus: list[Gpu], out: Path, *, host_gib: float, limit_s: float, side_by_side: int) -> None:
        self._gpus, self._out, self._host_gib, self._side_by_side = gpus, out, host_gib, side_by_side
        self._begin = time.monotonic()
        self._end = self._begin + limit_s
        self._running: list[_Running] = []
        self._ended: list[dict] = []

    def run(self, jobs: list[Job]) -> bool:
        """Run them; returns whether all ran and succeeded."""
        waiting = list(jobs)
        try:
            while waiting or self._running:
                self._reap(waiting)
                self._drop_late(waiting)
                while len(self._running) < self._side_by_side and (found := self._next(waiting)):
                    waiting.remove(found[0])
                    self._start(*found)
                time.sleep(0.2)
        finally:
            _stop(self._running)
        return all(row["state"] == "passed" for row in self._ended)

    def _next(self, waiting: list[Job]) -> tuple[Job, list[Gpu]] | None:
        return next_job(waiting, self._gpus, [running.job for running in self._running], self._host_gib)

    def _start(self, job: Job, gpus: list[Gpu]) -> None:
        for gpu in gpus:
            gpu.jobs.append(job)
        visible = ",".join(str(gpu.index) for gpu in gpus)
        # What `qarl train` keeps its tensors to, as a job's neighbours count on.
        own = {SHARE: str(1.0 if job.alone else job.memory_gib / min(gpu.memory_gib for gpu in gpus))}
        if job.alone:
            # Its figures are to be those of a process of its own, not of a client of the others' Multi-Process Service.
            own["CUDA_MPS_PIPE_DIRECTORY"] = str(self._out / "no_mps")
        with (self._out / f"{job.name}.txt").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, str(_SUPERVISE), job.run],
                cwd=_ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": visible, "PYTHONUNBUFFERED": "1"} | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # So that a terminal's interrupt reaches this program alone, which stops its jobs one way.
                start_new_session=True,
            )
        self._running.append(_Running(job, gpus, process, time.monotonic()))

    def _reap(self, waiting: list[Job]) -> None:
        late = time.monotonic() > self._end
        codes = [(running, running.process.poll()) for running in self._running]
        ended = [(running, code) for running, code in codes if late or code is not None]
        _stop([running for running, _ in ended])
        for running, code in ended:
            self._running.remove(running)
            for gpu in running.gpus:
                gpu.jobs.remove(running.job)
            state = "cut" if code is None else "failed" if code else "passed"
            self._note(running.job, state, time.monotonic() - running.start, waiting)

    def _drop_late(self, waiting: list[Job]) -> None:
        left = self._end - time.monotonic()
        for job in [job for job in waiting if job.seconds > left]:
            waiting.remove(job)
            self._note(job, "no time", 0.0, waiting)

    def _note(self, job: Job, state: str, seconds: float, waiting: list[Job]) -> None:
        now = time.monotonic()
        facts = {"name": job.name, "state": state, "seconds": round(seconds, 1), "expected_s": job.seconds}
        self._ended.append(facts | {"run": job.run, "log": str(self._out / f"{job.name}.txt")})
        write_atomic(self._out / "jobs.json", json.dumps(self._ended, indent=1) + "\n")
        left = sum(other.seconds * other.gpus for other in waiting)
        left += sum(max(0.0, one.job.seconds - (now - one.start)) * one.job.gpus for one in self._running)
        print(
            f"{now - self._begin:6.0f} s  {state:8} {job.name} after {seconds:.0f} s (expected {job.seconds:.0f}); "
            f"{len(waiting) + len(self._running)} left, {left / len(self._gpus):.0f} s at most",
            flush=True,
        )


def _stop(jobs: list[_Running]) -> None:
    for one in jobs:
        one.process.terminate()
    for one in jobs:
        try:
            one.process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def find_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, as the driver lists them; only those with their memory."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [row.groups() for row in map(_ROW.fullmatch, lines) if row]
    return [Gpu(int(index), float(mib) / 1024) for index, uuid, mib in rows if _is_visible(index, uuid)]


def _is_visible(index: str, uuid: str) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [index] if visible is None else [name.strip() for name in visible.split(",")]
    # CUDA takes the begin of a UUID for all of it.
    return any(name == index or (name.startswith("GPU-") and uuid.startswith(name)) for name in names)


def _unlisted() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ""
    return f" that CUDA_VISIBLE_DEVICES={visible!r} names: set it to indices or UUIDs that `nvidia-smi -L` lists"


def find_host_gib() -> float:
    """Return this host's memory, or its container's; endless where it cannot be told."""
    return first_host_gib() or math.inf


def _problems(jobs: list[Job], gpus: list[Gpu], host_gib: float) -> list[str]:
    if not gpus:
        return [f"nvidia-smi lists no GPU with its memory on this host{_unlisted()}"]
    found, room = [], min(gpu.memory_gib for gpu in gpus)
    if unset := unset_variables(jobs):
        found.append(f"commands read {', '.join(unset)}: set them in the environment, or --select others")
    if large := [job.name for job in jobs if job.memory_gib > room or job.gpus > len(gpus)]:
        found.append(f"{len(gpus)} GPU(s) of {room:.0f} GiB have no room for {', '.join(large)}: --select others")
    if heavy := [f"{job.name} ({job.host_gib:g})" for job in jobs if job.host_gib > host_gib]:
        found.append(
            f"the host has {host_gib:.0f} GiB of memory, and more is computed for {', '.join(heavy)}: --select others, "
            "or lower host_gib in the list where less has been measured"
        )
    return found


def main() -> int:
    """Run the jobs that the command line names; returns 1 if one did not pass, 2 if none can start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, help="jobs in YAML, e.g. tools/on_gpu/tests.yaml")
    parser.add_argument("--select", default="", metavar="REGEX", help="only jobs whose names match")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after as many seconds; default never")
    parser.add_argument("--side-by-side", type=int, default=8, help="jobs at once, which share the CPU's cores")
    parser.add_argument("--out", type=Path, default=Path("runs/on_gpu"), help="folder for logs; default runs/on_gpu")
    parser.add_argument("--check", action="store_true", help="only list the jobs")
    options = parser.parse_args()
    if options.side_by_side < 1:
        parser.error(f"--side-by-side {options.side_by_side}: set 1 or more")
    try:
        jobs = read_jobs(options.list, options.select)
        if not options.check:
            make_folder(options.out, "a folder for logs")
    except (ConfigError, FileError) as error:
        parser.error(str(error))
    if options.check:
        for job in jobs:
            print(f"{job.name}: {job.why}")
            host = f", {job.host_gib:g} of the host" if job.host_gib else ""
            print(f"    {job.gpus} GPU, {job.memory_gib:g} GiB{host}, {job.seconds:g} s: {job.run.strip()}")
        return 0
    gpus, host_gib = find_gpus(), find_host_gib()
    if problems := _problems(jobs, gpus, host_gib):
        parser.error("; ".join([*problems, "--check lists the jobs and starts nothing"]))
    limits = {"host_gib": host_gib, "limit_s": options.limit_s, "side_by_side": options.side_by_side}
    return int(not Host(gpus, options.out, **limits).run(jobs))


if __name__ == "__main__":
    # Jobs have sessions of their own, and would outlive a program that a signal ends at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
