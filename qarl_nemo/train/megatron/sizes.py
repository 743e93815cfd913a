"""Checks a model's sizes against a Megatron learner's layout, before its ranks start. Imports no Megatron."""

from transformers import PreTrainedConfig

from qarl_nemo.parallelism import divisors, either
from qarl_nemo.train.config import PolicyConfig

# Megatron asserts these while each rank builds its part.
_DIVIDED = {
    "tensor_model_parallel_size": ("num_attention_heads", "num_key_value_heads"),
    "expert_model_parallel_size": ("num_experts",),
    "expert_tensor_parallel_size": ("moe_intermediate_size",),
}


def require_sizes(policy: PolicyConfig, hf: PreTrainedConfig) -> None:
    """Require that ranks share heads, experts and their rows evenly, if Megatron is the learner.

    Args:
        policy: the policy block.
        hf: the model's config.

    Raises:
        ValueError: they do not; lists every size, what it does not divide, and what it may be.
    """
    megatron, problems = policy.megatron_cfg, []
    if megatron is None:
        return
    for key, names in _DIVIDED.items():
        size = getattr(megatron, key)
        counts = {name: count for name in names if (count := getattr(hf, name, None))}
        wrong = [f"{name}={count}" for name, count in counts.items() if count % size]
        if wrong:
            legal = either(divisors(megatron.num_gpus, *counts.values()))
            problems.append(f"{key}={size} does not divide the model's {' and '.join(wrong)}; it may be {legal}")
    if problems:
        raise ValueError(f"policy.megatron_cfg: {'; '.join(problems)}")
