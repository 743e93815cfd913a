"""Checks of the operators' tensors; every problem is named at once, with the legal values."""

import torch
from torch import Tensor

from qarl_kernels.ops.exact_math import INTERPRETED


def tensor_problems(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], num_dims: int = 2) -> list[str]:
    """List what keeps a tensor from being a contiguous operand on a CUDA device.

    Args:
        name: the argument's name in messages.
        tensor: the argument.
        dtypes: the legal dtypes.
        num_dims: the legal number of dimensions.

    Returns:
        One message per problem, empty if there is none.
    """
    problems = []
    if tensor.dim() != num_dims:
        problems.append(f"{name} has {tensor.dim()} dimensions (legal: {num_dims})")
    if tensor.dtype not in dtypes:
        problems.append(f"{name} is {tensor.dtype} (legal: {', '.join(map(str, dtypes))})")
    if not tensor.is_contiguous():
        problems.append(f"{name} is not contiguous: strides {tuple(tensor.stride())} (legal: rows one after another)")
    if not INTERPRETED and tensor.device.type != "cuda":
        problems.append(f"{name} is on {tensor.device} (legal: cuda; on a CPU use the torch reference)")
    return problems


def refuse(op: str, problems: list[str]) -> None:
    """Raise if there are problems.

    Args:
        op: the operator's name.
        problems: messages from the checks.

    Raises:
        ValueError: there is a problem; lists all of them.
    """
    if problems:
        raise ValueError(f"{op}: " + "; ".join(problems))
