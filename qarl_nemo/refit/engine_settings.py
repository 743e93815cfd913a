"""Settings of vLLM with which its arithmetic is the one that the learner follows."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl_formats import Kernel
from qarl_kernels import QuantFormat

# Receives refits, and mends vLLM's INT8 experts.
WORKER_EXTENSION = "qarl_nemo.refit.load.PackedRefit"
# vLLM reads these when it starts, in every process of an engine.
ENVIRONMENT = {
    # DeepGEMM would round activation scales to powers of two, for other kernels as well.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # The other runner returns no routed experts.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
COMPILATION: dict[str, Any] = {
    # The compiler is off, because fusing would remove roundings that the learner follows.
    "mode": 0,
    # The CUDA quantizer divides by the scale, as the learner does.
    "custom_ops": ["+quant_fp8"],
}


def kernel_options(fmt: QuantFormat, targets: Sequence[str]) -> dict[str, str]:
    """Return the engine arguments that choose kernels if vLLM has several for a GPU.

    Returns:
        `moe_backend` and `linear_backend`, each if it matters.
    """
    return {name: kernel.backend for name, kernel in _kernels(fmt, targets).items() if kernel.backend}


def kernel_choices(fmt: QuantFormat, targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values that engine arguments which choose kernels may have.

    Returns:
        `moe_backend` and `linear_backend`, each if a value of it runs a kernel that the learner does not follow.
    """
    return {name: kernel.backends for name, kernel in _kernels(fmt, targets).items() if kernel.backends}


def serving_options(fmt: QuantFormat, targets: Sequence[str]) -> dict[str, str]:
    """Return the engine arguments with which a GPU serves a checkpoint as its format says.

    Returns:
        `kernel_options` and the workers' extension.
    """
    return {"worker_extension_cls": WORKER_EXTENSION} | kernel_options(fmt, targets)


def serve_command(folder: Path, fmt: QuantFormat, targets: Sequence[str]) -> str:
    """Return the command with which vLLM serves a checkpoint as its format says."""
    command = ["vllm", "serve", str(folder)]
    if fmt.vllm.experts.mended and "experts" in targets:
        command += ["--worker-extension-cls", WORKER_EXTENSION]
    return shlex.join(command)


def _kernels(fmt: QuantFormat, targets: Sequence[str]) -> dict[str, Kernel]:
    experts = {"moe_backend": fmt.vllm.experts} if "experts" in targets else {}
    return experts | ({"linear_backend": fmt.vllm.linear} if set(targets) != {"experts"} else {})
