"""Converts source tensors to their stored form, several at a time."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from qarl_formats import BASELINE
from qarl_kernels import QuantFormat, get_format, largest, quantize_weight, unfit_values
from qarl_nemo.checkpoints.plan import PlannedTensor
from qarl_nemo.checkpoints.reader import DTYPES

# A multiple of every block of rows that shares a scale; temporaries of this few rows stay in a core's cache.
_ROWS_AT_ONCE = 256
_COPIED = get_format(BASELINE)


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """What became of one source tensor.

    Attributes:
        source: the source tensor.
        stored: output name -> tensor on the CPU; empty if there is a problem.
        problem: why the weight cannot be served, None if it can.
    """

    source: PlannedTensor
    stored: dict[str, Tensor]
    problem: str | None = None


class TensorConverter:
    """Reads tensors in order and converts them in as many threads as torch was given, in the same order."""

    def __init__(self, read: Callable[[PlannedTensor], Tensor], fmt: QuantFormat, device: str) -> None:
        """Start the threads.

        Args:
            read: returns a tensor in its shape in the output, on the CPU.
            fmt: format of the quantized tensors.
            device: where `quantize_weight` runs.
        """
        self._read = read
        self._fmt = fmt
        self._device = device
        self._largest: dict[str, Tensor] = {}
        self._torch_threads = torch.get_num_threads()
        self._num_threads = self._torch_threads if device == "cpu" else 1
        self._pool = ThreadPoolExecutor(self._num_threads, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> Self:
        # Idle workers of torch's own thread pool would spin on the cores that our threads need.
        torch.set_num_threads(1)
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def convert(self, tensors: Sequence[PlannedTensor]) -> Iterator[ConvertedTensor]:
        """Convert tensors in their order, holding at most one more than there are threads."""
        running: deque[Future[ConvertedTensor]] = deque()
        for tensor in tensors:
            weight = self._read(tensor)
            amax = self._shared_amax(tensor, weight)
            running.append(self._pool.submit(_convert_tensor, weight, tensor, self._fmt, self._device, amax))
            if len(running) > self._num_threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def _shared_amax(self, tensor: PlannedTensor, weight: Tensor) -> Tensor | None:
        if not (tensor.quantized and self._fmt.tensor_scaled):
            return None
        self._largest[tensor.info.name] = largest(weight)
        for info in tensor.fused:
            if info.name not in self._largest:
                self._largest[info.name] = largest(self._read(replace(tensor, info=info)))
        return torch.stack([self._largest[info.name] for info in (tensor.info, *tensor.fused)]).amax(0)


def _convert_tensor(
    weight: Tensor, tensor: PlannedTensor, fmt: QuantFormat, device: str, amax: Tensor | None = None
) -> ConvertedTensor:
    """Return a weight as the output holds it: `quantize_weight(weight)`, or its numbers; or why it cannot be."""
    name = tensor.info.name
    problem = unfit_values(weight, fmt if tensor.quantized else _COPIED, name)
    if problem is not None:
        return ConvertedTensor(tensor, {}, problem)
    if not tensor.quantized:
        return ConvertedTensor(tensor, {name: weight.to(DTYPES[tensor.dtype])})
    module = name.removesuffix(".weight")
    blocks = weight.split(_ROWS_AT_ONCE) if device == "cpu" else (weight.to(device),)
    amax = None if amax is None else amax.to(device)
    parts = [quantize_weight(block, fmt, name=name, amax=amax).narrowed().tensors for block in blocks]
    stored = {f"{module}.{suffix}": _joined([part[suffix] for part in parts]).cpu() for suffix in parts[0]}
    if fmt.stores_shape:
        stored[f"{module}.weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int64)
    return ConvertedTensor(tensor, stored)


def _joined(parts: list[Tensor]) -> Tensor:
    # A tensor without rows is the same in every block.
    return torch.cat(parts) if parts[0].ndim > 1 else parts[0]
