"""Exchanges plain data between a learner's ranks, as JSON in byte tensors, so that nothing that arrives can be code.

torch's `broadcast_object_list` and `all_gather_object` unpickle what arrives, and a pickle runs whatever it names; but
the ports on which ranks meet do not authenticate.
"""

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Longer than a whole refit of rank 0, whose waits for an engine each have their own limit.
PATIENCE = timedelta(hours=1)
_BYTES = "hexadecimal bytes"
_made: tuple[Any, Any] = (None, None)


def waiting_group() -> Any:
    """Return a gloo group of all ranks for waiting, because waiting in NCCL keeps kernels spinning on the GPU.

    The first call makes it and must happen on all ranks.
    """
    global _made
    world = dist.group.WORLD
    if _made[0] is not world:
        _made = world, dist.new_group(backend="gloo", timeout=PATIENCE)
    return _made[1]


def broadcast_plain(value: Any, group: Any, *, source: int = 0) -> Any:
    """Return one rank's value on every rank.

    Args:
        value: JSON data, and bytes; ignored on other ranks than the source.
        group: the process group.
        source: its rank in the group.

    Returns:
        The value; tuples have become lists.
    """
    return _decode(broadcast_bytes(_encode(value), group, source=source))


def broadcast_bytes(content: bytes, group: Any, *, source: int = 0) -> bytes:
    """Return one rank's bytes on every rank.

    Args:
        content: ignored on other ranks than the source.
        group: the process group.
        source: its rank in the group.

    Returns:
        The bytes.
    """
    raw = _tensor(content, group)
    size = torch.tensor([raw.numel()], device=raw.device)
    dist.broadcast(size, group=group, group_src=source)
    if group.rank() != source:
        raw = torch.empty(int(size), dtype=torch.uint8, device=raw.device)
    dist.broadcast(raw, group=group, group_src=source)
    return raw.cpu().numpy().tobytes()


def gather_plain(value: Any, group: Any) -> list[Any]:
    """Return every rank's value on every rank.

    Args:
        value: JSON data, and bytes.
        group: the process group.

    Returns:
        The values in the order of ranks; tuples have become lists.
    """
    raw = _tensor(_encode(value), group)
    size = torch.tensor([raw.numel()], device=raw.device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    padded = torch.nn.functional.pad(raw, (0, max(lengths) - raw.numel()))
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [_decode(row[:length].cpu().numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def _tensor(content: bytes, group: Any) -> Tensor:
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return raw if dist.get_backend(group) == "gloo" else raw.to(torch.device("cuda", torch.cuda.current_device()))


def _encode(value: Any) -> bytes:
    return json.dumps(value, default=_as_hexadecimal).encode()


def _decode(content: bytes) -> Any:
    return json.loads(content, object_hook=lambda found: bytes.fromhex(found[_BYTES]) if _BYTES in found else found)


def _as_hexadecimal(value: Any) -> dict[str, str]:
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    raise TypeError(f"no plain data: {value!r}")
