"""Settings of vLLM under which its arithmetic is the one the learner follows."""

from collections.abc import Sequence
from typing import Any

from qarl_kernels import QuantFormat

# Read by vLLM when it starts, in every process of an engine.
ENVIRONMENT = {
    # DeepGEMM would round activation scales to powers of two, also for kernels that are not its own.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # The other runner returns no routed experts.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
COMPILATION: dict[str, Any] = {
    # No compiler: it would fuse roundings away that the learner follows.
    "mode": 0,
    # The CUDA quantizer divides by the scale, as the learner does.
    "custom_ops": ["+quant_fp8"],
}
# Kernels whose arithmetic the learner follows, where vLLM has several for a GPU.
MOE_BACKENDS = {"w4a16": "marlin", "fp8_block": "triton", "bf16": "triton"}
LINEAR_BACKENDS = {"fp8_block": "cutlass"}


def kernel_options(fmt: QuantFormat, targets: Sequence[str]) -> dict[str, str]:
    """Return the engine arguments that choose kernels.

    Args:
        fmt: what is served.
        targets: which layers are quantized.

    Returns:
        `moe_backend` and `linear_backend`, each where it matters.
    """
    options = {}
    if "experts" in targets and fmt.name in MOE_BACKENDS:
        options["moe_backend"] = MOE_BACKENDS[fmt.name]
    if set(targets) != {"experts"} and fmt.name in LINEAR_BACKENDS:
        options["linear_backend"] = LINEAR_BACKENDS[fmt.name]
    return options
