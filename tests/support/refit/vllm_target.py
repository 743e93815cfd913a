"""The real engine as a target of the campaign of refit faults (`tests/campaign/refit_campaign.py`)."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refit_targets import Meddled

from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.publish import RefitUpdate


class VllmTarget:
    """A rig's engine; it can be stopped and killed where it runs in a process of its own.

    Args:
        rig: the rig of `checks.py`.
    """

    # A second call would read memory that was lent once.
    repeatable = ("qarl_version", "qarl_process", "qarl_begin", "qarl_verify", "qarl_replace")

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.engine = Meddled(rig.engine)
        self._process = ask(rig.engine, "qarl_process")[0]

    def next(self, name: str) -> RefitUpdate:
        """Return update `A` or `B` as the next version."""
        return self.rig.next(name)

    def sender(self, timeout_s: float) -> Any:
        """Return the rig's kind of sender."""
        return self.rig.new_sender(timeout_s)

    def weights(self) -> Any:
        """Return answers and checksums."""
        return self.rig.weights()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the engine's process."""
        os.kill(self._process, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the engine's process, which nothing starts anew."""
        os.kill(self._process, signal.SIGKILL)
