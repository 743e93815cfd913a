"""What a Megatron learner needs of the machine, of the model and of its layout, before its ranks start.

Imports no Megatron.
"""

from importlib.util import find_spec

import torch
from transformers import PreTrainedConfig

from qarl_nemo.installation import pip_command
from qarl_nemo.megatron.translatable import require_translatable
from qarl_nemo.parallelism import divisors, either
from qarl_nemo.train.config import PolicyConfig

# Megatron asserts these while each rank builds its part.
_DIVIDED = {
    "tensor_model_parallel_size": ("num_attention_heads", "num_key_value_heads"),
    "expert_model_parallel_size": ("num_experts",),
    "expert_tensor_parallel_size": ("moe_intermediate_size",),
}


def require_machine(policy: PolicyConfig, device: torch.device) -> None:
    """Require Megatron-core and a GPU, if Megatron is the learner.

    Args:
        policy: the policy block.
        device: the run's.

    Raises:
        ValueError: one or both are missing.
    """
    if policy.megatron_cfg is None:
        return
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


def require_model(policy: PolicyConfig, hf: PreTrainedConfig) -> None:
    """Require a model that Megatron can hold, and whose heads, experts and rows ranks share, if it is the learner.

    Args:
        policy: the policy block.
        hf: the model's config.

    Raises:
        ValueError: the model has features that are not translated, or ranks do not share it evenly; lists every one, or
            every size, what it does not divide, and what it may be.
    """
    megatron, problems = policy.megatron_cfg, []
    if megatron is None:
        return
    require_translatable(hf)
    for key, names in _DIVIDED.items():
        size = getattr(megatron, key)
        counts = {name: count for name in names if (count := getattr(hf, name, None))}
        wrong = [f"{name}={count}" for name, count in counts.items() if count % size]
        if wrong:
            legal = either(divisors(megatron.num_gpus, *counts.values()))
            problems.append(f"{key}={size} does not divide the model's {' and '.join(wrong)}; it may be {legal}")
    if problems:
        raise ValueError(f"policy.megatron_cfg: {'; '.join(problems)}")
