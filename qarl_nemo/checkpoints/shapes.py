"""Which weight shapes vLLM 0.25.1 serves in a format, and how many bytes the stored form takes."""

import math

from qarl_kernels import QuantFormat, weight_problems

# (N, K) must be multiples of these, on one GPU; tensor parallelism divides N or K further.
_MULTIPLES = {
    "w4a16": {"experts_in": (32, 128), "experts_out": (128, 32), "linear": (64, 128)},
    "w4a8": {"experts_in": (256, 256), "experts_out": (256, 256), "linear": (128, 128)},
    "fp8_block": {"experts_in": (128, 128), "experts_out": (128, 128), "linear": (128, 128)},
    "fp8_channel": {"experts_in": (16, 16), "experts_out": (16, 16), "linear": (16, 16)},
}
_FP8_BLOCK = 128
WEIGHT_SHAPE_BYTES = 16


def shape_problems(name: str, target: str, shape: tuple[int, ...], fmt: QuantFormat) -> list[str]:
    """Say why vLLM could not serve a weight of this shape in this format.

    Args:
        name: parameter name; an expert's down projection has other limits than its gate and up.
        target: the target it belongs to.
        shape: [N, K].
        fmt: the format.

    Returns:
        One sentence for each problem.
    """
    if len(shape) != 2:
        return [f"needs two dimensions [N, K], got shape {list(shape)}"]
    problems = weight_problems(shape, fmt)
    limits = _MULTIPLES.get(fmt.name)
    if limits is None:
        return problems
    role = "linear" if target != "experts" else "experts_out" if name.endswith("down_proj.weight") else "experts_in"
    for axis, size, multiple in zip("NK", shape, limits[role], strict=True):
        if size % multiple:
            problems.append(
                f"{axis}={size} is not a multiple of {multiple}, which vLLM's {fmt.name} {role} kernel needs"
            )
    if role == "experts_out":
        problems += marlin_problems(fmt.name, *shape, fmt.group_size)
    return problems


def marlin_problems(format_name: str, hidden: int, inner: int, group_size: int) -> list[str]:
    """Say whether vLLM would put the scales of gate and up projections in another order than its Marlin kernel reads.

    Args:
        format_name: what the experts are served in.
        hidden: size of the model's hidden states.
        inner: width of an expert on one of vLLM's ranks.
        group_size: weights a scale.

    Returns:
        One clause, or none.

    Source: vLLM 0.25.1, `_process_weights_marlin` in fused_moe/oracle/int_wna16.py: `size_k` of w13's scales is
    `intermediate_size_per_partition`, where the kernel goes by the hidden size.
    """
    if format_name != "w4a16" or not hidden > group_size >= inner:
        return []
    return [
        f"an expert of width {inner} on a rank is one w4a16 group of {group_size}: vLLM would order the scales of gate "
        "and up otherwise than its kernel reads them; a group size of 64 or 32, where smaller, is served"
    ]


def stored_bytes(shape: tuple[int, ...], fmt: QuantFormat) -> int:
    """Return the size of a weight as a checkpoint stores it, scales and `weight_shape` included.

    Args:
        shape: [N, K], legal for the format.
        fmt: the format.

    Returns:
        Bytes.
    """
    rows, columns = shape
    if fmt.weight_kind == "int":
        words = math.ceil(columns / (32 // fmt.num_bits))
        return rows * (4 * words + 2 * columns // fmt.group_size) + WEIGHT_SHAPE_BYTES
    if fmt.weight_kind == "fp8_block":
        return rows * columns + 4 * math.ceil(rows / _FP8_BLOCK) * math.ceil(columns / _FP8_BLOCK)
    if fmt.weight_kind == "fp8_channel":
        return rows * columns + 4 * rows
    return 2 * rows * columns
