"""Which sizes of a model vLLM's GPU kernels take."""

from collections.abc import Iterator, Sequence
from typing import Any

from qarl_formats import QuantFormat
from qarl_nemo.checkpoints.shapes import kernel_role, target_problems, width_problems

_GENERATIONS = {(9, 0): "Hopper", (10, 0): "Blackwell"}
# A size as the model's config names it.
Size = tuple[str, int]


def gpu_problems(fmt: QuantFormat, targets: Sequence[str], model: Any, capability: tuple[int, int]) -> list[str]:
    """Say what vLLM's GPU kernels refuse of a model.

    Args:
        fmt: what is served.
        targets: what is quantized.
        model: Hugging Face config of a Qwen model.
        capability: the GPU's compute capability.

    Returns:
        One clause for each size that has to change.

    Source: vLLM 0.25.1, `check_moe_marlin_supports_layer`, `CompressedTensorsW4A8Fp8MoEMethod.create_weights`,
    `CutlassW4A8LinearKernel.can_implement`, `validate_fp8_block_shape`, `cutlass_scaled_mm`.
    """
    problems = []
    served = fmt.vllm.capabilities
    if served and not served[0] <= capability <= served[1]:
        first, last, here = (f"SM{major}{minor}" for major, minor in (*served, capability))
        legal = f"{_GENERATIONS[served[1]]} ({last}) only" if first == last else f"{first} to {last}"
        problems.append(f"qarl.format={fmt.name} runs on {legal}, this GPU is {here}")
    needed = set()
    for target in targets:
        problems += target_problems(fmt, target)
        for name, sizes in _weights(model, target):
            multiples = fmt.multiples(kernel_role(name, target))
            needed |= {(*size, multiple) for size, multiple in zip(sizes, multiples, strict=True)}
    problems += [
        f"{fmt.name}: {name}={size} is not a multiple of {multiple}"
        for name, size, multiple in sorted(needed)
        if size % multiple
    ]
    if "experts" in targets and hasattr(model, "moe_intermediate_size"):
        problems += width_problems(fmt, model.hidden_size, model.moe_intermediate_size)
    return problems


def _weights(model: Any, target: str) -> Iterator[tuple[str, tuple[Size, Size]]]:
    hidden = ("hidden_size", model.hidden_size)
    if target == "attention":
        head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        query, key = (
            (f"{heads} * head_dim", getattr(model, heads) * head_dim)
            for heads in ("num_attention_heads", "num_key_value_heads")
        )
        # q, k and v are fused; each has to fill whole blocks of its own.
        yield from (("q_proj", (query, hidden)), ("k_proj", (key, hidden)), ("o_proj", (hidden, query)))
        return
    width = "moe_intermediate_size" if target == "experts" else "intermediate_size"
    if hasattr(model, width):
        inner = (width, getattr(model, width))
        yield from (("gate_proj", (inner, hidden)), ("down_proj", (hidden, inner)))
