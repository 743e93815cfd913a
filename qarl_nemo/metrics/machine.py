"""What a measured figure ran on: one line of hardware, and the versions that matter."""

import platform
from importlib.metadata import version
from pathlib import Path

import torch


def hardware(device: str) -> str:
    """Return one line that names the device.

    Args:
        device: `cpu` or `cuda`.

    Returns:
        For example `1x NVIDIA H200` or `2 cores of AMD EPYC`.
    """
    if device == "cuda":
        return f"1x {torch.cuda.get_device_name()}"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models) or '?'} cores of {models[0] if models else platform.machine()}"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and transformers."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")}
