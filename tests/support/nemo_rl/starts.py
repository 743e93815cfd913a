"""Starts of a case: the launcher's program, an actor killed while it runs, and what is kept of it afterwards."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nemo_rl

from support.nemo_rl.cases import RECIPE, ROOT, Case, Start, overrides
from support.nemo_rl.cluster import Cluster, end

_NEMO_RL = Path(nemo_rl.__file__).parents[1]
TIMEOUT_S = float(os.environ.get("QARL_NEMO_RL_TIMEOUT", "900"))
# From the death of an actor to the end of the program.
_DEATH_S = 60.0
# Of the warm start.
_LEARNING_RATES = {"tiny": "6e-4", "1b": "2e-4", "dense": "6e-4"}
_STEP = re.compile(r"=+ Step (\d+)/")
# What the driver prints when it turns to these actors, and how many seconds later they are at it.
_AT_WORK = {
    "QarlGenerationWorker": ("Generating responses", 0.8),
    "QarlMegatronPolicyWorker": ("Preparing for training", 1.0),
}
_MAX_TEXT = 300_000
_MAX_WORKERS = 12


@dataclass(frozen=True, slots=True)
class Ended:
    """How a start ended.

    Attributes:
        code: its exit code; None where it was still running when its time was up.
        text: its output.
        logs: its own log folder, exp_...; None where it made none.
    """

    code: int | None
    text: str
    logs: Path | None

    @property
    def begun(self) -> list[int]:
        """The steps it began."""
        return [int(step) for step in _STEP.findall(self.text)]


def make_model(size: str, folder: Path, gpu: int) -> Path:
    """Return a folder with model/, train.jsonl and val.jsonl, made unless it is there."""
    if not (folder / "val.jsonl").exists() or not (folder / "model" / "model.safetensors").exists():
        tool = str(ROOT / "tools" / "make" / "arithmetic_model.py")
        command = [sys.executable, tool, str(folder), "--largest", "9", "--size", size, "--warm-start", "0.5"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        learning = ["--batch", "64", "--lr", _LEARNING_RATES[size]]
        subprocess.run([*command, *learning], env=environment, check=True, timeout=300)
    return folder


def run_start(case: Case, start: Start, cluster: Cluster, model: Path, folder: Path) -> Ended:
    """Run one start to its end, or to the end of its time.

    Args:
        case: one of `CASES`.
        start: one of its.
        cluster: with the case's GPUs free.
        model: what `make_model` returned.
        folder: the case's folder: logs, checkpoints and outputs of all its starts.
    """
    launcher = _NEMO_RL / "examples" / "run_grpo.py" if start.executes is None else ROOT / "examples/run_qarl_grpo.py"
    # Several clusters on a host draw lots for ports in the same range else.
    low = 1400 + 120 * (int(cluster.address.rpartition(":")[2]) // 2000 % 8)
    ports = [f"cluster.master_port_range_low={low}", f"cluster.master_port_range_high={low + 120}"]
    program = [sys.executable, "-m", "support.nemo_rl.run_flushed", str(launcher), "--config", str(RECIPE)]
    command = [*program, *overrides(case, start, model, folder), *ports]
    before = set((folder / "logs").glob("exp_*"))
    output = folder / f"driver_{len(before) + 1}.txt"
    with output.open("w") as file:
        running = subprocess.Popen(
            command, env=_environment(cluster, folder), cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        _wait(running, start, cluster, output)
    finally:
        end(running)
    made = set((folder / "logs").glob("exp_*")) - before
    text = output.read_text(errors="replace")
    return Ended(None if running.returncode < 0 else running.returncode, text, max(made, default=None))


def keep(cluster: Cluster, folder: Path, kept: Path) -> None:
    """Copy what is small and says something: logs, the newest dump of a batch, outputs."""
    kept.mkdir(parents=True, exist_ok=True)
    for logs in (folder / "logs").glob("exp_*"):
        wanted = [*logs.glob("tensorboard/events*"), *logs.glob("run.json"), *logs.glob("config.yaml")]
        dumps = sorted(logs.glob("train_data_step*.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in [*wanted, *dumps[-1:]]:
            target = kept / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for path in folder.glob("driver_*.txt"):
        (kept / path.name).write_text(_shortened(path.read_text(errors="replace")))
    logs = sorted(cluster.worker_logs, key=lambda path: path.stat().st_size, reverse=True)[:_MAX_WORKERS]
    tails = [f"=== {path.name}\n{path.read_text(errors='replace')[-15_000:]}" for path in logs]
    (kept / "workers.txt").write_text("\n".join(tails))


def _environment(cluster: Cluster, folder: Path) -> dict[str, str]:
    defaults = {
        "NEMO_RL_ROOT": str(_NEMO_RL),
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    # Every rank says what it executes, and none of it is left out as another's.
    own = {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0", "NRL_MEGATRON_CHECKPOINT_DIR": str(folder / "megatron")}
    paths = [str(ROOT), str(ROOT / "kernels"), cluster.environment["PYTHONPATH"]]
    return defaults | dict(cluster.environment) | own | {"PYTHONPATH": os.pathsep.join(paths)}


def _wait(running: subprocess.Popen, start: Start, cluster: Cluster, output: Path) -> None:
    deadline, alive = time.monotonic() + TIMEOUT_S, bool(start.kills)
    while running.poll() is None and time.monotonic() < deadline:
        if alive and _is_at_work(start, output.read_text(errors="replace")):
            time.sleep(_AT_WORK[start.kills][1])
            victims = cluster.actors(start.kills)
            assert victims, f"no process of {start.kills}"
            # Of several one alone: the others have to be ended, too.
            victims[0].kill()
            alive, deadline = False, time.monotonic() + _DEATH_S
        time.sleep(0.2)


def _is_at_work(start: Start, text: str) -> bool:
    steps = list(_STEP.finditer(text))
    return len(steps) > start.kills_after and _AT_WORK[start.kills][0] in text[steps[start.kills_after].end() :]


def _shortened(text: str) -> str:
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]}\n....\n{text[-half:]}"
