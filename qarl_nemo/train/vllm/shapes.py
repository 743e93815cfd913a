"""Which sizes of a model vLLM's GPU kernels take."""

from typing import Any

from qarl_nemo.checkpoints.shapes import marlin_problems

_W4A8_CAPABILITY = (9, 0)


def gpu_problems(qarl: Any, model: Any, capability: tuple[int, int]) -> list[str]:
    """Say what vLLM's GPU kernels refuse of a model.

    Args:
        qarl: the `qarl:` block.
        model: Hugging Face config of a Qwen model.
        capability: the GPU's compute capability.

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
    if "experts" in qarl.targets and hasattr(model, "moe_intermediate_size"):
        problems += marlin_problems(qarl.format, model.hidden_size, model.moe_intermediate_size, qarl.group_size or 128)
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
