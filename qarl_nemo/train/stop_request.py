"""A run that is told to end (SIGTERM), as clusters tell it before they kill it, ends after its step."""

import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

# A cluster's signal reaches a process by itself and once more through the one that started it.
_SAME_S = 5.0
_SAYS = b"told to end (SIGTERM): ends after this step; told again later, at once\n"


class StopRequest:
    """While entered, takes SIGTERM as a request; one that comes 5 s later or more does what it did before.

    Args:
        file: tells other processes of the request, by being there, and may be made by one of them.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._told_at: float | None = None
        self._before: Any = None

    @property
    def made(self) -> bool:
        """Whether this process, or another one that knows the file, was told to end."""
        return self._told_at is not None or (self._file is not None and self._file.exists())

    def __enter__(self) -> "StopRequest":
        # Elsewhere Python takes no signals.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _take(self, *_: object) -> None:
        if self._told_at is not None:
            if time.monotonic() >= self._told_at + _SAME_S:
                signal.signal(signal.SIGTERM, self._before)
                signal.raise_signal(signal.SIGTERM)
            return
        self._told_at = time.monotonic()
        if self._file is not None:
            self._file.touch()
        # A print that this one interrupts must not be entered again.
        os.write(2, _SAYS)
