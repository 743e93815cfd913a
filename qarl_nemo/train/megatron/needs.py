"""What the Megatron learner needs of this machine; imports no Megatron."""

from importlib.util import find_spec

import torch

from qarl_nemo.installation import pip_command


def require_machine(device: torch.device) -> None:
    """Refuse a Megatron learner that this machine cannot run, before a model is loaded and warmed up for it.

    Args:
        device: the run's.

    Raises:
        ValueError: Megatron-core is missing, or there is no GPU for it.
    """
    problems = []
    if find_spec("megatron") is None:
        problems.append(f"megatron-core is missing: {pip_command('megatron')}")
    if device.type == "cpu" and (torch.cuda.is_available() or not _has_streams()):
        problems.append("Megatron computes on GPUs, and this run's device is the CPU")
    if problems:
        raise ValueError(f"policy.megatron_cfg: {'; '.join(problems)}; null is the transformers learner")


def _has_streams() -> bool:
    """Tell whether CUDA's streams can be had, as on GPUs, and in tests that stand in for them on a CPU."""
    try:
        torch.cuda.Stream()
    except (RuntimeError, AssertionError):
        return False
    return True
