"""Waits for another process with a time limit that holds whatever it does: a stopped process never answers."""

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
    """Start a call on a thread that delays neither the caller nor the end of the process.

    Args:
        call: what to do.
        turn: a lock to hold meanwhile; a call that is cancelled before it has the lock is never made.

    Returns:
        A future of its result or exception.
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
        what: what is waited for, for the error.
        call: what to do; if it is given up, it ends on its own, and its result is dropped.
        owner: the object that is called, one call at a time: a call that has not ended delays later ones, so that none
            takes another's answer for its own.

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
            # The call's own, or its answer in the last moment.
            return future.result()
        earlier = ": it has not ended an earlier call" if future.cancel() else ""
        raise TimeoutError(f"{what} did not answer within {timeout_s:g} s{earlier}") from None
