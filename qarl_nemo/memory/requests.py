"""What a user asks for by name, checked against a model: targets, groups and layouts."""

from collections.abc import Sequence

from qarl_formats import find_format, formats_with_groups
from qarl_nemo.memory.layouts import require_layout, require_targets
from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.names import check_targets, split_targets
from qarl_nemo.parallelism import Parallelism


def named_targets(model: ModelSize, targets: str | None) -> tuple[str, ...]:
    """Return what is quantized.

    Args:
        model: the model's sizes.
        targets: comma-separated; None: the model's experts, or its MLP if it is dense.

    Raises:
        ValueError: a name is unknown, or the model lacks a target.
    """
    chosen = check_targets(split_targets(targets)) if targets is not None else ()
    chosen = chosen or ("experts" if model.num_experts else "mlp",)
    require_targets(model, chosen)
    return chosen


def require_groups(format_name: str, group_size: int | None) -> None:
    """Refuse a group size where a known format has none.

    Raises:
        ValueError: it would change nothing.
    """
    fmt = find_format(format_name)
    if group_size is not None and fmt and not fmt.group_sizes:
        grouped = ", ".join(formats_with_groups())
        raise ValueError(f"format {format_name!r} takes no group_size; {grouped} have one: remove it")


def named_layouts(model: ModelSize, names: Sequence[str], num_gpus: int) -> list[Parallelism]:
    """Return the layouts of some names.

    Args:
        model: the model's sizes.
        names: such as `tp2_ep8`.
        num_gpus: GPUs that share the model.

    Raises:
        ValueError: some do not split the model or the GPUs evenly; every one is listed.
    """
    found, problems = [], []
    for name in names:
        try:
            found.append(Parallelism.parse(name, num_gpus))
            require_layout(model, found[-1])
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return found
