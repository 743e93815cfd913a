"""Work that breaks off in the middle."""

import itertools
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class FailsAt(TorchDispatchMode):
    """Lets one of torch's operations fail, as on a device without memory, and counts them; 0 lets none fail."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            raise MemoryError(f"operation {self.number}, {function}")
        return function(*args, **(kwargs or {}))


def third_call_fails(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """The function, but for its third call."""
    calls = itertools.count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise error
        return function(*arguments)

    return call
