"""What vLLM does not serve: formats beside adapters, and formats on a CPU."""

from collections.abc import Sequence

import torch

from qarl_formats import BASELINE, QuantFormat, get_format, served_formats


def adapter_problems(formats: Sequence[QuantFormat], targets: Sequence[str], device: torch.device) -> list[str]:
    """Say why vLLM does not serve these formats with adapters.

    Args:
        formats: what is served.
        targets: which layers are in it.
        device: the engine's.

    Returns:
        Sentences that say what to do, or nothing.
    """
    problems = ["vLLM takes adapters on a GPU; set --engine packed"] if device.type == "cpu" else []
    without = [fmt.name for fmt in formats if not fmt.runs_beside_adapters(targets)]
    if without:
        names = ", ".join(without)
        problems.append(f"vLLM's kernels for experts of {names} do not run beside adapters; set --engine packed")
    return problems


def cpu_problems(fmt: QuantFormat, targets: tuple[str, ...]) -> list[str]:
    """Say whether vLLM on a CPU serves a format.

    Returns:
        One sentence that names what it serves, or nothing.
    """
    served = fmt.served_on("cpu")
    if served and served.serves(fmt.group_size, targets):
        return []
    quantized = [get_format(name) for name in served_formats("cpu") if name != BASELINE]
    groups = f" with group size {fmt.group_size}" if fmt.group_size else ""
    return [
        f"vLLM on a CPU does not serve {fmt.name}{groups} of {', '.join(targets)}; it serves "
        + ", and ".join(map(_on_cpu, quantized))
    ]


def _on_cpu(fmt: QuantFormat) -> str:
    served = fmt.served_on("cpu")
    assert served
    groups = f" with groups of {' or '.join(map(str, served.group_sizes))}" if served.group_sizes else ""
    return fmt.name + groups + (" of experts" if served.experts_only else "")
