"""One rank's part in refits, whatever it serves the weights with: the order of steps, and what each of them requires.

A learner calls begin, receive, verify, replace; nothing here relies on that. Whatever comes instead, repeated, out of
turn or late, `replace` serves an update only when all of its manifest has arrived and been verified.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.incoming import IncomingUpdate
from qarl_nemo.refit.manifest import Manifest, version_problems


class RankSession(ABC):
    """Refits of one rank.

    Args:
        arrivals: what brings tensors to it.

    Attributes:
        version: served last; None before the first refit.
        whole: whether it is served, and nothing broke off while it was being replaced.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.version: int | None = None
        self.whole = True
        self._update: IncomingUpdate | None = None
        self._rehearsed = self._replacing = False

    @abstractmethod
    def refusals(self, manifest: Manifest, *, rehearsed: bool) -> list[str]:
        """Say why this rank cannot serve what is announced."""

    @abstractmethod
    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return what this rank keeps of a whole tensor."""

    @abstractmethod
    def pieces(self, names: Iterable[str]) -> list[str]:
        """Say what this rank installs at once and these tensors, which came together, are only a part of."""

    @abstractmethod
    def stop_serving(self) -> None:
        """Refuse to answer from now on: weights are being replaced."""

    @abstractmethod
    def install(self, parts: dict[str, Tensor]) -> None:
        """Put these parts, which are verified, into the weights; all of an update, or a layer of a rehearsed one."""

    @abstractmethod
    def serve_again(self) -> None:
        """Answer again: all weights are replaced."""

    def begin(self, message: dict[str, Any], rehearsed: bool) -> list[str]:
        """Expect an update; one that was under way is forgotten.

        Args:
            message: the manifest's.
            rehearsed: it comes twice, to be verified and to be served, and only a layer of it is held at a time.

        Returns:
            What speaks against it; if anything does, nothing is expected.

        Raises:
            ValueError: the message is no manifest.
        """
        self._update = None
        manifest = Manifest.from_message(message)
        problems = version_problems(manifest.version, self.version) + self.refusals(manifest, rehearsed=rehearsed)
        if not problems:
            self._update = IncomingUpdate(manifest, self.part)
            self._rehearsed, self._replacing = rehearsed, False
        return problems

    def receive(self, version: int, kind: str, message: Any) -> None:
        """Take tensors in, by one of the ways of `Arrivals`; those of a rehearsed update are not kept.

        Args:
            version: that they belong to.
            kind: the way.
            message: of the sender.

        Raises:
            RuntimeError: that version is not expected.
            ValueError: tensors are served that differ from those of the rehearsal.
        """
        update = self._expected(version)
        self.arrivals.receive(kind, message, update)
        if not self._rehearsed:
            return
        # Nothing of one message is kept for the next, and a piece of a layer would be installed beside nothing.
        update.refuse(self.pieces(update.parts))
        if self._replacing:
            _require(update.problems_of_arrived(), "what was served is not what was rehearsed")
            self.install(update.parts)
        update.parts.clear()
        if self.arrivals.device.type == "cuda":
            # The learner makes the next layer where this one lies.
            torch.cuda.synchronize(self.arrivals.device)

    def verify(self, version: int) -> list[str]:
        """Return what makes the expected update unfit to serve.

        Args:
            version: of the update.

        Raises:
            RuntimeError: that version is not expected.
        """
        return self._expected(version).problems()

    def replace(self, version: int) -> None:
        """Serve the expected update; of a rehearsed one, expect what is served.

        Args:
            version: of the update.

        Raises:
            RuntimeError: that version is not expected, or is being replaced already.
            ValueError: the update is not whole; what was served stays.
        """
        update = self._expected(version)
        if self._replacing:
            raise RuntimeError(f"version {version} is being replaced already: its tensors come, then qarl_replaced")
        _require(update.problems(), f"version {version} is not served")
        self._update, self.whole = None, False
        self.stop_serving()
        if self._rehearsed:
            self._replacing, self._update = True, IncomingUpdate(update.manifest, self.part)
            return
        self.install(update.parts)
        self._serve(version)

    def finish(self, version: int) -> None:
        """Serve the rehearsed update, all of whose tensors have come again.

        Args:
            version: of the update.

        Raises:
            RuntimeError: that version is not expected, or its replacing has not begun.
            ValueError: some have not come again.
        """
        update = self._expected(version)
        if not self._replacing:
            raise RuntimeError(f"version {version} is not being replaced: qarl_replace comes first")
        _require(update.problems(), "what was served is not what was rehearsed")
        self._update, self._replacing = None, False
        self._serve(version)

    def abort(self, version: int) -> None:
        """Forget an update; another one that is under way goes on.

        Args:
            version: of the update.
        """
        if self._update is not None and self._update.manifest.version == version:
            self._update = None

    def state(self) -> dict[str, Any]:
        """Return the version served last and whether it is whole."""
        return {"version": self.version, "whole": self.whole}

    def _serve(self, version: int) -> None:
        self.serve_again()
        self.version, self.whole = version, True

    def _expected(self, version: int) -> IncomingUpdate:
        if self._update is None:
            raise RuntimeError("no refit is under way in this rank: qarl_begin comes first")
        expected = self._update.manifest.version
        if expected != version:
            raise RuntimeError(f"this is of version {version!r}; the refit under way in this rank is to {expected}")
        return self._update


def _require(problems: list[str], outcome: str) -> None:
    if problems:
        raise ValueError(f"{outcome}; {len(problems)} problem(s):\n  " + "\n  ".join(problems))
