"""Which weight shapes vLLM 0.25.1 serves in a format, and how many bytes the stored form takes."""

import math
from collections.abc import Sequence

from qarl_formats import QuantFormat, Role
from qarl_kernels import stored_layout, weight_problems
from qarl_nemo.architecture import Architecture
from qarl_nemo.names import target_of

WEIGHT_SHAPE_BYTES = 16


def shape_problems(name: str, target: str, shape: tuple[int, ...], fmt: QuantFormat) -> list[str]:
    """Say why vLLM could not serve a weight of this shape in this format.

    Args:
        name: parameter name; an expert's down projection has other limits than its gate and up.
        target: the target it belongs to.
        shape: [N, K].
        fmt: the format.
    """
    if len(shape) != 2:
        return [f"needs two dimensions [N, K], got shape {list(shape)}"]
    problems = target_problems(fmt, target) + weight_problems(shape, fmt)
    role = kernel_role(name, target)
    for axis, size, multiple in zip("NK", shape, fmt.vllm.shapes[role], strict=True):
        if size % multiple:
            problems.append(
                f"{axis}={size} is not a multiple of {multiple}, which vLLM's {fmt.name} {role} kernel needs"
            )
    if role == "experts_out":
        problems += width_problems(fmt, *shape)
    return problems


def target_problems(fmt: QuantFormat, target: str) -> list[str]:
    """Say whether vLLM has no kernel of a format for a target.

    Returns:
        One clause, or none.

    Source: vLLM 0.25.1, `CompressedTensorsWNA16MarlinMoEMethod.__init__` and `CompressedTensorsWNA16MoEMethod`.
    """
    if target != "experts" or not fmt.vllm.linear_only:
        return []
    return [
        f"vLLM serves codes of {fmt.num_bits} bits in dense layers only, experts take 4 and 8: use w8a16 or w4a16, or "
        "w3a16 or w2a16 without --own-width"
    ]


def kernel_role(name: str, target: str) -> Role:
    """Return which of vLLM's kernels multiplies a weight."""
    if target != "experts":
        return "linear"
    return "experts_out" if "down_proj" in name else "experts_in"


def width_problems(fmt: QuantFormat, hidden: int, inner: int) -> list[str]:
    """Say whether vLLM would put the scales of gate and up projections in another order than its Marlin kernel reads.

    Args:
        fmt: what the experts are served in.
        hidden: size of the model's hidden states.
        inner: width of an expert on one of vLLM's ranks.

    Returns:
        One clause, or none.

    Source: vLLM 0.25.1, `_process_weights_marlin` in fused_moe/oracle/int_wna16.py: `size_k` of w13's scales is
    `intermediate_size_per_partition`, where the kernel goes by the hidden size.
    """
    if not fmt.vllm.several_groups or not hidden > fmt.group_size >= inner:
        return []
    smaller = [str(size) for size in fmt.group_sizes if size < inner and inner % size == 0]
    fix = f"a group size of {' or '.join(smaller)} is served" if smaller else "no smaller group size divides it"
    return [
        f"an expert of width {inner} on a rank is no more than one {fmt.name} group of {fmt.group_size}: vLLM would "
        f"order the scales of gate and up otherwise than its kernel reads them; {fix}"
    ]


def engine_shard(name: str, shape: tuple[int, ...], parts: int, head_dim: int) -> tuple[int, int]:
    """Return the shape of the part of a weight that each of vLLM's ranks holds.

    Args:
        name: parameter name; `o_proj` and `down_proj` are split along K, all others along N.
        shape: [N, K].
        parts: ranks that share it.
        head_dim: width of a head; where there are fewer key-value heads than ranks, each rank has a whole one.

    Returns:
        [N, K] of a part.
    """
    rows, columns = shape
    if "o_proj" in name or "down_proj" in name:
        return rows, math.ceil(columns / parts)
    least = head_dim if "k_proj" in name or "v_proj" in name else 1
    return max(math.ceil(rows / parts), least), columns


def engine_problems(
    model: Architecture, fmt: QuantFormat, targets: Sequence[str], tp: int, *, whole_experts: bool = False
) -> list[tuple[str, str]]:
    """Say which parts of a model's weights vLLM's ranks could not serve in a format.

    Args:
        model: the model.
        fmt: the format.
        targets: what is quantized.
        tp: ranks that share each weight.
        whole_experts: ranks share experts, but not their weights.

    Returns:
        For each kind of weight and reason its target, and a line with the weight's name first.
    """
    problems: dict[tuple[str, str], None] = {}
    # One of a kind stands for all layers and experts.
    kinds = {(".experts." in name, name.split(".")[-2], shape): name for name, shape in model.parameters()}
    for (_, linear, shape), name in kinds.items():
        target = target_of(name)
        # Values are cut as keys are, and up as gate.
        if target is None or target not in targets or linear in ("v_proj", "up_proj"):
            continue
        shard = engine_shard(name, shape, 1 if target == "experts" and whole_experts else tp, model.head_dim)
        for problem in shape_problems(name, target, shard, fmt):
            problems[target, f"{linear}: {problem}"] = None
    return list(problems)


def stored_bytes(shape: tuple[int, ...], fmt: QuantFormat) -> int:
    """Return the size of a weight as a checkpoint stores it, scales and `weight_shape` included.

    Args:
        shape: [N, K], legal for the format.
        fmt: the format.

    Returns:
        Bytes.
    """
    tensors = sum(math.prod(part) * dtype.itemsize for part, dtype in stored_layout(shape, fmt.narrowed).values())
    return tensors + (WEIGHT_SHAPE_BYTES if fmt.stores_shape else 0)
