"""What vLLM serves as the rollout engine, held against a config before anything is loaded. Imports no torch."""

from typing import Any

_FORMATS = {"cpu": ("w4a16", "fp8_block", "bf16"), "cuda": ("w4a16", "w4a8", "fp8_block", "fp8_channel", "bf16")}
_GROUP_SIZES = {
    ("cpu", "w4a16"): (64, 128),
    ("cuda", "w4a16"): (32, 64, 128),
    ("cuda", "w4a8"): (128,),
}
_W4A8_CAPABILITY = (9, 0)


def config_problems(config: Any, device: str) -> list[str]:
    """Say which settings vLLM cannot follow.

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


def gpu_problems(qarl: Any, model: Any, capability: tuple[int, int]) -> list[str]:
    """Say what vLLM's GPU kernels refuse of a model.

    Args:
        qarl: the `qarl:` block.
        model: Hugging Face config of a Qwen model.
        capability: of the GPU.

    Returns:
        One clause for each size that has to change.

    Source: vLLM 0.25.1, `check_moe_marlin_supports_layer`, `CompressedTensorsW4A8Fp8MoEMethod.create_weights`,
    `CutlassW4A8LinearKernel.can_implement`, `validate_fp8_block_shape`, `cutlass_scaled_mm`.
    """
    problems = []
    if qarl.format == "w4a8" and capability != _W4A8_CAPABILITY:
        problems.append(f"qarl.format=w4a8 runs on Hopper (SM90) only, this GPU is SM{capability[0]}{capability[1]}")
    for name, size, multiple in _sizes(qarl, model):
        if size % multiple:
            problems.append(f"{qarl.format}: {name}={size} is not a multiple of {multiple}")
    return problems


def _sizes(qarl: Any, model: Any) -> list[tuple[str, int, int]]:
    hidden, group_size = ("hidden_size", model.hidden_size), qarl.group_size or 128
    needed: list[tuple[tuple[str, int], int]] = []
    if "experts" in qarl.targets and hasattr(model, "moe_intermediate_size"):
        inner = ("moe_intermediate_size", model.moe_intermediate_size)
        by_format = {
            "w4a16": [(hidden, 128), (inner, group_size)],
            "w4a8": [(hidden, 256), (inner, 256)],
            "fp8_block": [(inner, 128)],
            "fp8_channel": [(hidden, 16), (inner, 16)],
        }
        needed += by_format.get(qarl.format, [])
    if "attention" in qarl.targets:
        query = ("num_attention_heads * head_dim", model.num_attention_heads * model.head_dim)
        key = ("num_key_value_heads * head_dim", model.num_key_value_heads * model.head_dim)
        fused = ("width of the fused q, k and v", query[1] + 2 * key[1])
        by_format = {
            "w4a16": [(hidden, group_size), (query, group_size)],
            "w4a8": [(hidden, 128), (query, 128), (fused, 128)],
            # q, k and v are fused, each in whole blocks.
            "fp8_block": [(query, 128), (key, 128)],
            "fp8_channel": [(hidden, 16), (query, 16), (fused, 16)],
        }
        needed += by_format.get(qarl.format, [])
    return sorted({(*named, multiple) for named, multiple in needed})
