"""Carries an optimizer's state to the host and back while the GPU goes on with other work.

Copies go through pinned memory that is kept, on a stream of their own. Adam's state of a large model is ten thousand
tensors of a few MB, and each would be freed, allocated and copied by itself. So they are packed once, into pieces.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

# PyTorch rounds pinned memory up to a power of two: 46 GB in one block would take 64.
PIECE_BYTES = 2**28
# Larger than what passing tensors leave free in memory that others keep reserved, so that each has memory of its own.
GATHERED_BYTES = 2**31
# A smaller rest of a piece is not worth a block and a copy of its own.
_SMALLEST_BLOCK_BYTES = 2**20
# What CUDA's allocator aligns to.
_ALIGNMENT = 512
# A step count, which several parameters may share, stays on the GPU.
_SMALLEST_BYTES = 1024


class Offload:
    """Takes tensors off the GPU and brings them back; they stay the same objects, with the same bits.

    The host's copy is only read while the GPU's memory is free, and the GPU's memory is only freed when the copy is
    whole. So a call that fails, for want of memory for example, loses nothing and may be repeated.

    Args:
        piece_bytes: size of a piece, a power of two; a larger tensor is a piece of its own.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._pieces: list[Tensor] = []
        self._host: list[Tensor] = []
        self._place: Literal["here", "leaving", "away", "returning"] = "here"
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def pageable_bytes(self) -> int:
        """Host memory that could not be pinned, which is slower and makes the host wait for each copy."""
        return sum(memory.numel() for memory in self._host if not memory.is_pinned())

    @torch.no_grad()
    def start_offload(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy tensors to the host; until `finish_offload` nobody may change them.

        Args:
            tensors: contiguous, of one device and any dtype and shape. No two share memory, and views that others hold
                of them would not follow. Ignored where tensors are on their way or away already.
        """
        if self._place == "returning":
            self.finish_reload()
        if self._place != "here" or not tensors:
            return
        if not self._packed(tensors):
            self._pack(tensors, self._piece_bytes)
        self._reserve()
        with self._beside():
            for piece, host in self._pairs():
                host.copy_(piece, non_blocking=True)
        self._place = "leaving"

    @torch.no_grad()
    def gather(self, tensors: Sequence[Tensor], piece_bytes: int = GATHERED_BYTES) -> None:
        """Move tensors that stay into pieces of memory of their own, so that what lies between them can be given back.

        An optimizer makes its state within its first step, beside tensors that pass, and the allocator keeps a block as
        long as any part of it is in use.

        Args:
            tensors: as `start_offload` takes them; nothing happens if they are packed already, or away.
            piece_bytes: size of a piece; this much more memory is needed meanwhile.
        """
        if self._place == "here" and tensors and not self._packed(tensors):
            self._pack(tensors, piece_bytes)

    def finish_offload(self) -> None:
        """Wait for the copies, then free the tensors' memory; nothing happens if they are not leaving."""
        if self._place != "leaving":
            return
        if self._copied is not None:
            self._copied.synchronize()
        for piece in self._pieces:
            piece.untyped_storage().resize_(0)
        self._place = "away"

    @torch.no_grad()
    def start_reload(self) -> None:
        """Allocate the tensors' memory again and start to copy them back; tensors that have not left yet just stay.

        Raises:
            torch.OutOfMemoryError: the GPU has no room; what there was is freed again.
        """
        if self._place == "leaving":
            self._place = "here"
        if self._place != "away":
            return
        try:
            for piece in self._pieces:
                piece.untyped_storage().resize_(piece.numel())
        except RuntimeError:
            for piece in self._pieces:
                piece.untyped_storage().resize_(0)
            raise
        with self._beside():
            for piece, host in self._pairs():
                piece.copy_(host, non_blocking=True)
        self._place = "returning"

    def finish_reload(self) -> None:
        """Bring the tensors back, if nobody has started to; what the GPU computes from now on waits for them."""
        self.start_reload()
        if self._place == "returning" and self._copied is not None:
            torch.cuda.current_stream(self._pieces[0].device).wait_event(self._copied)
        self._place = "here"

    def _packed(self, tensors: Sequence[Tensor]) -> bool:
        return {_memory(tensor) for tensor in tensors} == {_memory(piece) for piece in self._pieces}

    def _pack(self, tensors: Sequence[Tensor], piece_bytes: int) -> None:
        # Pieces of another packing are freed when the last of their tensors has moved.
        self._pieces = []
        for group in _groups(tensors, piece_bytes):
            piece = torch.empty(sum(map(_padded, group)), dtype=torch.uint8, device=group[0].device)
            offset = 0
            for tensor in group:
                packed = piece[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                tensor.data = packed.copy_(tensor)
                offset += _padded(tensor)
            self._pieces.append(piece)

    def _reserve(self) -> None:
        sizes = [_rounded(part.numel()) for part in self._parts()]
        missing, blocks = Counter(sizes), defaultdict[int, list[Tensor]](list)
        for memory in self._host:
            if missing[memory.numel()]:
                missing[memory.numel()] -= 1
                blocks[memory.numel()].append(memory)
        # Another packing's blocks go before new ones come.
        self._host = [memory for same in blocks.values() for memory in same]
        for size in missing.elements():
            blocks[size].append(_host_memory(size))
        self._host = [blocks[size].pop(0) for size in sizes]

    def _parts(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            yield from piece.split(_block_sizes(piece.numel(), self._piece_bytes))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part, host in zip(self._parts(), self._host, strict=True):
            yield part, host[: part.numel()]

    @contextmanager
    def _beside(self) -> Iterator[None]:
        device = self._pieces[0].device
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        self._copied = torch.cuda.Event()
        self._copied.record(self._stream)


def optimizer_tensors(optimizer: Any, model: nn.Module) -> list[Tensor]:
    """Return what an optimizer holds beside the model, on its device: its state, and masters of another dtype.

    Args:
        optimizer: Megatron's, or torch's.
        model: whose parameters it changes.

    Returns:
        The tensors that can be moved, in the optimizer's order.
    """
    parameters = list(model.parameters())
    # A freed buffer has no address; an optimizer may hold views of it, too.
    shared = {0} | {_memory(parameter) for parameter in parameters}
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    states = [value for _, state in optimizer.state.items() for value in state.values() if torch.is_tensor(value)]
    return [
        tensor
        for tensor in masters + states
        if tensor.device == parameters[0].device
        and tensor.nbytes >= _SMALLEST_BYTES
        and tensor.is_contiguous()
        and _memory(tensor) not in shared
    ]


def parameter_buffers(model: Any) -> list[Any]:
    """Return Megatron's buffers that hold parameters: those of a distributed optimizer. No other parameters can leave.

    Args:
        model: Megatron's DistributedDataParallel.
    """
    return [one for one in (*model.buffers, *model.expert_parallel_buffers) if one.param_data is not None]


def leaving_bytes(model: Any) -> int:
    """Return what parameters will free on the GPU when Megatron sends them to the host; those that are there free none.

    Args:
        model: Megatron's DistributedDataParallel.
    """
    return sum(buffer.param_data.untyped_storage().nbytes() for buffer in parameter_buffers(model))


def reserve_parameters(model: Any) -> None:
    """Give Megatron's buffers the host memory that parameters leave to, so that it need not pin a second copy of them.

    Args:
        model: Megatron's DistributedDataParallel, whose buffers are changed in place.
    """
    for buffer in parameter_buffers(model):
        if buffer.param_data_cpu is None:
            memory = _host_memory(buffer.param_data.nbytes)[: buffer.param_data.nbytes]
            buffer.param_data_cpu = memory.view(buffer.param_data.dtype)


def reload_for_update(optimizer: Any, offload: Offload) -> None:
    """Make an optimizer's tensors come back by themselves: while gradients are computed, in time for the step.

    Args:
        optimizer: Megatron's, changed in place; whoever trains calls its `zero_grad` before the first gradient.
        offload: what carries its tensors.
    """
    zero_grad, step = optimizer.zero_grad, optimizer.step

    @functools.wraps(zero_grad)
    def zero_and_start(*args: Any, **kwargs: Any) -> Any:
        offload.start_reload()
        return zero_grad(*args, **kwargs)

    @functools.wraps(step)
    def wait_and_step(*args: Any, **kwargs: Any) -> Any:
        offload.finish_reload()
        return step(*args, **kwargs)

    optimizer.zero_grad, optimizer.step = zero_and_start, wait_and_step


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _groups(tensors: Sequence[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if group and num_bytes + _padded(tensor) > most_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(tensor)
        num_bytes += _padded(tensor)
    yield group


def _block_sizes(num_bytes: int, most_bytes: int) -> list[int]:
    """Divide a piece into powers of two, as which memory is pinned, so that little of it is wasted."""
    sizes = []
    while num_bytes > min(_SMALLEST_BLOCK_BYTES, most_bytes):
        sizes.append(min(most_bytes, 1 << (num_bytes.bit_length() - 1)))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes


def _rounded(num_bytes: int) -> int:
    # As CUDA pins it.
    return 1 << (num_bytes - 1).bit_length()


def _host_memory(num_bytes: int) -> Tensor:
    if torch.cuda.is_available():
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            # The system pins no more.
            pass
    return torch.empty(num_bytes, dtype=torch.uint8)
