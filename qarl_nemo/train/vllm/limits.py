"""Checks a config against what vLLM can serve as the rollout engine, before anything is loaded. Imports no torch."""

from typing import Any

_FORMATS = {"cpu": ("w4a16", "fp8_block", "bf16"), "cuda": ("w4a16", "w4a8", "fp8_block", "fp8_channel", "bf16")}
_GROUP_SIZES = {
    ("cpu", "w4a16"): (64, 128),
    ("cuda", "w4a16"): (32, 64, 128),
    ("cuda", "w4a8"): (128,),
}


def config_problems(config: Any, device: str) -> list[str]:
    """Say which settings vLLM cannot serve.

    Args:
        config: a `LocalConfig` whose rollout engine is vLLM.
        device: `cpu` or `cuda`.

    Returns:
        One clause for each setting that has to change, legal values named.
    """
    qarl, problems, where = config.qarl, [], {"cpu": "CPU", "cuda": "GPU"}[device]
    if qarl.format not in _FORMATS[device]:
        legal = ", ".join(_FORMATS[device])
        problems.append(f"vLLM has no {where} kernel for qarl.format={qarl.format}; legal: {legal}")
    group_sizes = _GROUP_SIZES.get((device, qarl.format))
    if group_sizes and qarl.group_size not in (None, *group_sizes):
        legal = ", ".join(map(str, group_sizes))
        problems.append(f"its {where} kernel does not take qarl.group_size={qarl.group_size}; legal: {legal}")
    if device == "cpu" and qarl.format == "fp8_block" and qarl.targets != ("experts",):
        problems.append("on a CPU fp8_block is served for experts only; set qarl.targets=[experts]")
    if config.policy.precision != "bfloat16" and (qarl.format != "bf16" or device == "cuda"):
        problems.append("its kernels for this compute in BF16; set policy.precision=bfloat16")
    if device == "cpu" and qarl.router_replay:
        problems.append("on a CPU it returns no routed experts; set qarl.router_replay=false")
    if device == "cpu" and config.rollout.own_gpu:
        problems.append("on a CPU it shares the learner's process; set rollout.own_gpu=false")
    if config.rollout.top_p < 1:
        problems.append("its logprobs would be of the truncated distribution; set rollout.top_p=1")
    return problems
