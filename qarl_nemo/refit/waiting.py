"""Waiting for another process no longer than was said, whatever it does: one that is stopped answers nothing."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_MAKING = threading.Lock()
_TURNS: WeakKeyDictionary[object, AbstractContextManager[Any]] = WeakKeyDictionary()


def in_background(call: Callable[[], T], turn: AbstractContextManager[Any] | None = None) -> "Future[T]":
    """Start a call on a thread that holds up neither the caller nor the end of the process.

    Args:
        call: what to do.
        turn: held meanwhile; a call that was cancelled before its turn came is never made.

    Returns:
        Its result, or what it raises.
    """
    future: Future[T] = Future()

    def work() -> None:
        with turn or threading.Lock():
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 raised where the result is asked for
                future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def within(timeout_s: float | None, what: str, call: Callable[[], T], *, owner: object) -> T:
    """Return a call's result, or give up on it.

    Args:
        timeout_s: seconds to wait; None makes the call on this thread and waits as long as it takes.
        what: is waited for, for the error.
        call: what to do; one that was given up ends on its own, and its result is dropped.
        owner: answers calls one at a time: one that it still has to end keeps later ones waiting, so that none takes
            another's answer for its own.

    Returns:
        Its result.

    Raises:
        TimeoutError: it took longer.
    """
    if timeout_s is None:
        return call()
    with _MAKING:
        turn = _TURNS.setdefault(owner, threading.Lock())
    future = in_background(call, turn)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():
            raise
        earlier = ": it has not ended an earlier call" if future.cancel() else ""
        raise TimeoutError(f"{what} did not answer within {timeout_s:g} s{earlier}") from None
