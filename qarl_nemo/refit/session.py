"""One rank's part in refits, whichever engine it belongs to: the order of steps and what each of them requires.

A learner calls begin, receive, verify, replace, but nothing here relies on that. Even if calls are missing, repeated,
out of order or late, `replace` serves an update only if all of its manifest has arrived and been verified.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.incoming import IncomingUpdate
from qarl_nemo.refit.manifest import Manifest, require_no_problems, version_problems

# The tensors that one layer takes, by published name.
Parts = dict[str, Tensor]


class RankSession(ABC):
    """Refits of one rank.

    Attributes:
        version: the version served last; None before the first refit.
        whole: whether that version is served, and no replacement of it broke off.
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
    def layer_of(self, name: str) -> str:
        """Name the layer that takes a tensor; what one layer takes is installed together."""

    @abstractmethod
    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return what this rank keeps of a whole tensor."""

    def pieces(self, layers: Mapping[str, Parts]) -> list[str]:  # noqa: ARG002 for those that install more at once
        """Name the layers of which these tensors, which came together, are only a part; by default that is allowed."""
        return []

    @abstractmethod
    def install(self, layers: dict[str, Parts]) -> None:
        """Put verified tensors into the weights: all of an update, or one message of a rehearsed one."""

    def stop_serving(self) -> None:
        """Refuse to answer from now on, because weights are being replaced in place."""
        self.whole = False

    def serve_again(self) -> None:
        """Answer again: all weights are replaced."""
        self.whole = True

    def begin(self, message: dict[str, Any], rehearsed: bool) -> list[str]:
        """Expect an update; one that was under way is forgotten.

        Args:
            message: the manifest as a message.
            rehearsed: whether it is sent twice, to be verified and to be served, and held one layer at a time.

        Returns:
            Reasons against it; if there are any, it is not expected.

        Raises:
            ValueError: the message is not a manifest.
        """
        self._update = None
        manifest = Manifest.from_message(message)
        problems = version_problems(manifest.version, self.version) + self.refusals(manifest, rehearsed=rehearsed)
        if not problems:
            self._update = self._incoming(manifest)
            self._rehearsed, self._replacing = rehearsed, False
        return problems

    def receive(self, version: int, kind: str, message: Any) -> None:
        """Take tensors in, in one of the ways of `Arrivals`; those of a rehearsed update are not kept.

        Args:
            version: the version that they belong to.
            kind: the way.
            message: the sender's message.

        Raises:
            RuntimeError: that version is not expected.
            ValueError: tensors to be served differ from those of the rehearsal.
        """
        update = self._expected(version)
        self.arrivals.receive(kind, message, update)
        if not self._rehearsed:
            return
        # Nothing is kept from one message to the next, so a piece of a layer would never be completed.
        update.refuse(self.pieces(update.layers))
        if self._replacing:
            require_no_problems(update.problems_of_arrived(), "what was served is not what was rehearsed")
            self.install(update.layers)
        update.layers.clear()
        if self.arrivals.device.type == "cuda":
            # Wait until this layer is installed, because the learner will overwrite it with the next one.
            torch.cuda.synchronize(self.arrivals.device)

    def verify(self, version: int) -> list[str]:
        """Return what makes the expected update unfit to serve.

        Args:
            version: the update's version.

        Raises:
            RuntimeError: that version is not expected.
        """
        return self._expected(version).problems()

    def replace(self, version: int) -> None:
        """Serve the expected update, or begin to: a rehearsed one is sent again to be served.

        Args:
            version: the update's version.

        Raises:
            RuntimeError: that version is not expected, or is being replaced already.
            ValueError: the update is not whole; what was served stays.
        """
        update = self._expected(version)
        if self._replacing:
            raise RuntimeError(f"version {version} is being replaced already: its tensors come, then qarl_replaced")
        require_no_problems(update.problems(), f"version {version} is not served")
        self._update = None
        self.stop_serving()
        if self._rehearsed:
            self._replacing, self._update = True, self._incoming(update.manifest)
            return
        self.install(update.layers)
        self._serve(version)

    def finish(self, version: int) -> None:
        """Serve the rehearsed update once all of its tensors have been sent again.

        Args:
            version: the update's version.

        Raises:
            RuntimeError: that version is not expected, or its replacing has not begun.
            ValueError: some have not been sent again.
        """
        update = self._expected(version)
        if not self._replacing:
            raise RuntimeError(f"version {version} is not being replaced: qarl_replace comes first")
        require_no_problems(update.problems(), "what was served is not what was rehearsed")
        self._update, self._replacing = None, False
        self._serve(version)

    def abort(self, version: int) -> None:
        """Forget an update; another one that is under way goes on."""
        if self._update is not None and self._update.manifest.version == version:
            self._update = None

    def state(self) -> dict[str, Any]:
        """Return the version served last and whether it is whole."""
        return {"version": self.version, "whole": self.whole}

    def _incoming(self, manifest: Manifest) -> IncomingUpdate:
        return IncomingUpdate(manifest, layer_of=self.layer_of, part=self.part)

    def _serve(self, version: int) -> None:
        self.serve_again()
        self.version = version

    def _expected(self, version: int) -> IncomingUpdate:
        if self._update is None:
            raise RuntimeError("no refit is under way in this rank: qarl_begin comes first")
        expected = self._update.manifest.version
        if expected != version:
            raise RuntimeError(f"this is of version {version!r}; the refit under way in this rank is to {expected}")
        return self._update
