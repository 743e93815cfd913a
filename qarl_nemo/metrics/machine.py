"""What a measured figure ran on: one line of hardware, and the versions that matter."""

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from qarl_nemo.installation import installed_version

_THEN = ", then "


def hardware(device: str, num_gpus: int = 1) -> str:
    """Return one line that names the device.

    Args:
        device: `cpu` or `cuda`.
        num_gpus: how many GPUs took part.

    Returns:
        For example `1x NVIDIA H200` or `2 cores of AMD EPYC`.
    """
    if device == "cuda":
        return f"{num_gpus}x {torch.cuda.get_device_name()}"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models) or '?'} cores of {models[0] if models else platform.machine()}"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and transformers."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")}


def facts(device: str, num_gpus: int = 1, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a run ran on.

    Args:
        device: `cpu` or `cuda`.
        num_gpus: how many GPUs took part.
        packages: versions of those that are installed or imported are added.

    Returns:
        `hardware` and `versions`.
    """
    found = {name: number for name in packages if (number := installed_version(name) or _imported_version(name))}
    return {"hardware": hardware(device, num_gpus), "versions": versions() | found}


def went_on(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resumed run ran on: `A, then B` for each fact that has changed.

    Args:
        before: what it had run on, as `facts` returns it, or as this does.
        now: what it goes on with.

    Returns:
        `hardware` and `versions`.
    """
    had = before["versions"]
    went = {name: _then(had.get(name), value) for name, value in now["versions"].items()}
    return {"hardware": _then(before["hardware"], now["hardware"]), "versions": had | went}


def _then(before: str | None, now: str) -> str:
    return now if before is None else before if before.split(_THEN)[-1] == now else before + _THEN + now


def _imported_version(package: str) -> str | None:
    # Megatron-core on a path to its sources is no installed package.
    modules = (sys.modules.get(package.replace("-", mark)) for mark in "._")
    return next((module.__version__ for module in modules if hasattr(module, "__version__")), None)
