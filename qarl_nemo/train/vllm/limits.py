"""Checks a config against what vLLM can serve as the rollout engine, before anything is loaded. Imports no torch."""

from typing import Any

from qarl_formats import BASELINE, get_format, served_formats


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
    if config.policy.precision != "bfloat16" and (qarl.format != BASELINE or device == "cuda"):
        problems.append("its kernels for this compute in BF16; set policy.precision=bfloat16")
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
