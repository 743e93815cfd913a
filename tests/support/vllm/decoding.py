"""What the tests of both decode kernels beside vLLM's Marlin share."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import vllm._custom_ops as ops
from torch import Tensor

from support.asserts import assert_snr


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, operator: str, kernel: str, *cached: Any) -> Iterator[list[Any]]:
    """Keep what each call of a kernel gets; afterwards vLLM's operator and what was cached are as before."""
    function, ran = pkgutil.resolve_name(kernel), []

    def count(*arguments: Any) -> Tensor:
        ran.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(ops, operator, getattr(ops, operator))
    monkeypatch.setattr(kernel, count)
    for each in cached:
        each.cache_clear()
    yield ran
    for each in cached:
        each.cache_clear()


def assert_is_marlins(run: Callable[[], Tensor], expected: Tensor, scale: Tensor) -> None:
    """The layer gives what Marlin gave up to the order of sums, and not if `scale` were one percent off."""
    found = run()
    # Sums in another order change a last bit here and there.
    assert_snr(found, expected, 60)
    assert float((found == expected).float().mean()) > 0.98
    scale *= 1.01
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(run(), expected, 60)
