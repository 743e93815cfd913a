"""When a run has to end, so that its last checkpoint is written before a deadline."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

STARTED = "QARL_STARTED"
"""Names the variable with the time, in seconds since 1970, at which the command of a whole comparison started."""

# What is measured, and how a checkpoint calls its longest time.
_KEYS = {"step": "longest_step_s", "checkpoint": "longest_checkpoint_s"}
_LIMIT = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")


def limit_seconds(text: str) -> int:
    """Return the seconds of `DD:HH:MM:SS`.

    Args:
        text: days, hours, minutes and seconds.

    Raises:
        ValueError: it is something else, or no time at all.
    """
    found = _LIMIT.fullmatch(text)
    days, hours, minutes, seconds = map(int, found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"expected days:hours:minutes:seconds, for example '00:03:45:00', not {text!r}")
    return total


def spent_seconds() -> float:
    """Return how long the command of the comparison that this process belongs to has run; 0 where there is none."""
    return max(0.0, time.time() - float(os.environ.get(STARTED, "inf")))


class TimeLimit:
    """Tells when no other step fits: elapsed + the longest step and the longest checkpoint so far >= limit.

    Args:
        text: from now on, `spent_seconds` less, in `DD:HH:MM:SS`; None = no limit.
        clock: counts seconds.

    Source:
        NeMo-RL 0.6, `nemo_rl/utils/timer.py`, whose limit is looked at after a step alone.
    """

    def __init__(self, text: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if text is None else clock() + limit_seconds(text) - spent_seconds()
        self._longest: dict[str, float] = {}

    @contextmanager
    def timed(self, what: Literal["step", "checkpoint"]) -> Iterator[None]:
        """Measure a step or a checkpoint."""
        started = self._clock()
        yield
        self._longest[what] = max(self._longest.get(what, 0.0), self._clock() - started)

    def counters(self) -> dict[str, float]:
        """Return the longest times so far, for a checkpoint: a part of a run may have none of what its end needs."""
        return {_KEYS[what]: seconds for what, seconds in self._longest.items()}

    def resume(self, counters: Mapping[str, float]) -> None:
        """Go on with what a checkpoint holds of `counters`."""
        self._longest = {what: counters[key] for what, key in _KEYS.items() if key in counters}

    def is_up(self) -> bool:
        """Return whether another step and its checkpoint would end too late."""
        return self._end is not None and self._clock() + sum(self._longest.values()) >= self._end
