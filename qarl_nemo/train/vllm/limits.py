"""Checks a config against what vLLM can serve as the rollout engine, before anything is loaded. Imports no torch."""

import math
from typing import Any

from qarl_formats import get_format, served_formats

# Tokens in a block of the KV cache.
_BLOCKS = {"cpu": 128, "cuda": 16}


def config_problems(config: Any, device: str) -> list[str]:
    """Say which settings vLLM cannot serve.

    Args:
        config: a `LocalConfig` whose rollout engine is vLLM.
        device: `cpu` or `cuda`.

    Returns:
        One clause for each setting that has to change, legal values named.
    """
    qarl, problems, where = config.qarl, [], {"cpu": "CPU", "cuda": "GPU"}[device]
    fmt = get_format(qarl.format)
    served = fmt.served_on(device)
    if served is None:
        legal = ", ".join(served_formats(device))
        why = f"has no {where} kernel for" if fmt.vllm.refits else "serves checkpoints, but takes no refits of"
        problems.append(f"vLLM {why} qarl.format={qarl.format}; legal: {legal}")
    elif served.group_sizes and qarl.group_size not in (None, *served.group_sizes):
        legal = ", ".join(map(str, served.group_sizes))
        problems.append(f"its {where} kernel does not take qarl.group_size={qarl.group_size}; legal: {legal}")
    if served and served.experts_only and qarl.targets != ("experts",):
        problems.append(f"on a {where} {qarl.format} is served for experts only; set qarl.targets=[experts]")
    if config.policy.precision != "bfloat16":
        # Targets are published in BF16, also in the format bf16, and an engine in FP32 has no place for them.
        problems.append("it serves BF16 weights; set policy.precision=bfloat16, or rollout.engine=packed")
    if device == "cpu" and qarl.router_replay:
        problems.append("on a CPU it returns no routed experts; set qarl.router_replay=false")
    if device == "cpu" and config.rollout.own_gpu:
        problems.append("on a CPU it shares the learner's process; set rollout.own_gpu=false")
    if config.rollout.top_p < 1:
        problems.append("its logprobs would be of the truncated distribution; set rollout.top_p=1")
    if config.policy.lora is not None:
        problems += _adapter_problems(qarl, device)
    return problems


def _adapter_problems(qarl: Any, device: str) -> list[str]:
    if device == "cpu":
        return ["on a CPU it takes no adapters; set rollout.engine=packed"]
    if get_format(qarl.format).runs_beside_adapters(qarl.targets):
        return []
    legal = ", ".join(name for name in served_formats(device) if get_format(name).runs_beside_adapters(qarl.targets))
    return [
        f"its kernels for {qarl.format} experts do not run where policy.lora has adapters, on whichever layers; legal "
        f"qarl.format: {legal}"
    ]


def room_problems(rollout: Any, model: Any, kv_bytes: int, device: str) -> list[str]:
    """Say where a request of the longest length has no room.

    Args:
        rollout: the rollout block, with vLLM as the engine.
        model: Hugging Face config of the model.
        kv_bytes: size of one token's keys and values.
        device: `cpu` or `cuda`.

    Returns:
        One clause for each setting that has to change, legal values named.
    """
    positions, problems = model.max_position_embeddings, []
    longest = rollout.max_model_len or positions
    # Of scaled positions vLLM has a rule of its own.
    if longest > positions and (model.rope_parameters or {}).get("rope_type", "default") == "default":
        problems.append(f"rollout.max_model_len={longest} exceeds the model's positions; set at most {positions}")
    block = _BLOCKS[device]
    # vLLM keeps one block empty and counts it all the same: a request that needs every block would wait for ever.
    needed = (math.ceil(longest / block) + 1) * block * kv_bytes / 2**30
    if needed > rollout.kv_cache_gib and not getattr(model, "sliding_window", None):
        # Upwards at the seventh digit, so that what is named suffices.
        problems.append(
            f"rollout.kv_cache_gib={rollout.kv_cache_gib:g} has no room for one request of {longest} tokens "
            f"(rollout.max_model_len); set it to {needed * (1 + 1e-5):.6g} or more, or a smaller rollout.max_model_len"
        )
    return problems
