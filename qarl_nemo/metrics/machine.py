"""What a measured figure ran on: one line of hardware, and the versions that matter."""

import platform
from importlib.metadata import version
from pathlib import Path

import torch


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
