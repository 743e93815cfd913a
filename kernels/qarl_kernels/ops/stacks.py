"""Expert weights where they are in memory, a tensor [N, K], a stack [E, N, K] or E tensors, as a table of addresses.

Kernels read the address of expert e from an int64 table [E] on the device, so experts need not be contiguous:
Megatron's distributed optimizer lays them out in reverse order, and without it their addresses are unrelated. For one
load of eight bytes in each program no expert has to be copied.
"""

import functools
import itertools

import torch
import triton
from torch import Tensor

from qarl_kernels.ops.checks import refuse
from qarl_kernels.ops.exact_math import INTERPRETED
from qarl_kernels.weights import Weights

ALIGNMENT = 16
_TABLES = 1024
# Host memory that a captured CUDA graph reads each time it is replayed.
_CAPTURED: list[Tensor] = []


def expert_weights(
    op: str, weights: Weights, column_multiple: int, max_columns: int | None = None
) -> tuple[list[Tensor], bool]:
    """Check expert weights and return them as the list that the registered operators take.

    Args:
        op: the operator's name in messages.
        weights: BF16 [N, K], [E, N, K] with any stride between experts, or E tensors [N, K]; each expert contiguous.
        column_multiple: what K must be a multiple of.
        max_columns: the largest K; None = any.

    Returns:
        tensors: one tensor [N, K] or [E, N, K], or E tensors [N, K]; stacked: whether results have an expert dimension.

    Raises:
        ValueError: a rank, shape, dtype, device or memory layout is not legal; everything wrong is named.
    """
    single = isinstance(weights, Tensor)
    named = {"weights": weights} if single else {f"weights[{expert}]": one for expert, one in enumerate(weights)}
    tensors = list(named.values())
    if not tensors:
        refuse(op, ["weights is an empty list (legal: at least one tensor [N, K])"])
    problems = device_problems(tensors)
    for name, tensor in named.items():
        problems += [f"{name} {problem}" for problem in _problems(tensor, tensors[0], single, column_multiple)]
    columns = tensors[0].shape[-1] if tensors[0].ndim else 0
    if max_columns is not None and columns > max_columns:
        problems.append(f"K={columns} (legal: at most {max_columns})")
    refuse(op, problems)
    return tensors, not single or tensors[0].ndim == 3


def _problems(tensor: Tensor, first: Tensor, single: bool, column_multiple: int) -> list[str]:
    shape, strides = list(tensor.shape), list(tensor.stride())
    if tensor.ndim not in ((2, 3) if single else (2,)) or tensor.numel() == 0:
        return [f"is {shape} (legal: [N, K]{' or [E, N, K]' if single else ''}, not empty)"]
    problems = []
    if tensor.dtype != torch.bfloat16:
        problems.append(f"is {tensor.dtype} (legal: torch.bfloat16)")
    if shape[-1] % column_multiple:
        problems.append(f"has K={shape[-1]} (legal: multiples of {column_multiple})")
    if not (tensor if tensor.ndim == 2 else tensor[0]).is_contiguous():
        problems.append(f"has strides {strides} (legal: contiguous experts, [..., {shape[-1]}, 1])")
    if tensor.shape != first.shape:
        problems.append(f"is {shape} (legal: as the first, {list(first.shape)})")
    return problems


def device_problems(tensors: list[Tensor]) -> list[str]:
    """Say why one kernel cannot read all of these tensors.

    Args:
        tensors: at least one.

    Returns:
        One message, or none.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1 and (INTERPRETED or tensors[0].device.type == "cuda"):
        return []
    return [f"on {', '.join(sorted(map(str, devices)))} (legal: one cuda device; on a CPU use the torch reference)"]


def stack_shape(tensors: list[Tensor]) -> tuple[int, int, int]:
    """Return E, N, K of what `expert_weights` returned.

    Args:
        tensors: one tensor [N, K] or [E, N, K], or E tensors [N, K].
    """
    rows, columns = tensors[0].shape[-2:]
    return tensors[0].shape[0] if tensors[0].ndim == 3 else len(tensors), rows, columns


def address_table(tensors: list[Tensor]) -> tuple[Tensor, int]:
    """Return every expert's address, and the alignment of all of them: 16 bytes, or 2 if one is unaligned.

    Tables are cached by the addresses in them. A new one is made without waiting for the device.

    Args:
        tensors: what `expert_weights` returned.

    Returns:
        table: [E] int64 on the device; alignment: in bytes.
    """
    if tensors[0].ndim == 3:
        start, step = tensors[0].data_ptr(), tensors[0].stride(0) * tensors[0].element_size()
        addresses = tuple(start + step * expert for expert in range(tensors[0].shape[0]))
    else:
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
    alignment = 2 if any(address % ALIGNMENT for address in addresses) else ALIGNMENT
    device = tensors[0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _new_table(addresses, device, capturing=True), alignment
    # Tables are cached by stream, too: work in another stream could read a table before it is written.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept_table(addresses, device, stream), alignment


@functools.lru_cache(maxsize=_TABLES)
def _kept_table(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:  # noqa: ARG001
    return _new_table(addresses, device, capturing=False)


def _new_table(addresses: tuple[int, ...], device: torch.device, *, capturing: bool) -> Tensor:
    steps = {after - before for before, after in itertools.pairwise(addresses)} or {1}
    if len(steps) == 1 and 0 not in steps:
        step = steps.pop()
        return torch.arange(addresses[0], addresses[0] + step * len(addresses), step, dtype=torch.int64, device=device)
    host = torch.tensor(addresses, dtype=torch.int64)
    if device.type != "cuda":
        return host
    host = host.pin_memory()
    if capturing:
        _CAPTURED.append(host)
    return host.to(device, non_blocking=True)


def row_tile(units: int, width: int) -> tuple[int, int, int, int]:
    """Say how warps share whole rows: a thread holds up to 64 weights of one row, a warp as many rows as fit.

    Args:
        units: parts of a row, each held by `width` neighbouring threads that take 8 weights.
        width: threads for each part.

    Returns:
        rows of a tile; parts of a row side by side; parts one after another in a thread; warps.
    """
    padded = triton.next_power_of_2(units)
    warps_per_row = max(1, padded * width // 256)
    spread = min(padded, warps_per_row * 32 // width)
    num_warps = max(4, warps_per_row)
    return num_warps * 32 // (spread * width), spread, padded // spread, num_warps
