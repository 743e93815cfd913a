"""The receiving half of a refit as one rank has it, with no engine around it: what transports are tested against."""

import os
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.incoming import IncomingUpdate
from qarl_nemo.refit.manifest import Manifest


@answering
class ReceivingRank:
    """Takes updates in, checks them and holds what was served last; its methods are those that `push` calls."""

    def __init__(self, rank: int = 0) -> None:
        self._own = rank
        self.arrivals = Arrivals(rank, torch.device("cpu"))
        self.version: int | None = None
        self.served: dict[str, Tensor] = {}
        self.update: IncomingUpdate | None = None
        self.rehearsed, self.replacing = False, False
        self.most_held = 0

    def qarl_process(self) -> int:
        """Return this process."""
        return os.getpid()

    def qarl_place(self, first_rank: int) -> None:
        """Number the rank among those of all engines."""
        self.arrivals.rank = first_rank + self._own

    def qarl_version(self) -> dict[str, Any]:
        """Return what is served."""
        return {"version": self.version, "whole": not self.replacing}

    def qarl_connect(self, message: dict[str, Any]) -> None:
        """Join the learner's group."""
        self.arrivals.connect(message)

    def qarl_begin(self, manifest: dict[str, Any], rehearsed: bool) -> list[str]:
        """Expect an update."""
        self.update = IncomingUpdate(Manifest.from_message(manifest), lambda _, whole: whole)
        self.rehearsed, self.replacing = rehearsed, False
        return []

    def qarl_receive(self, kind: str, message: Any) -> None:
        """Take tensors in."""
        self.arrivals.receive(kind, message, self.update)
        self.most_held = max(self.most_held, len(self.update.parts))
        if self.replacing:
            problems = self.update.problems_of_arrived()
            if problems:
                raise ValueError("; ".join(problems))
            self.served |= {name: part.clone() for name, part in self.update.parts.items()}
        if self.rehearsed:
            self.update.parts.clear()

    def qarl_verify(self) -> list[str]:
        """Check them."""
        return self.update.problems()

    def qarl_replace(self) -> None:
        """Serve them."""
        self.version, self.served = self.update.manifest.version, dict(self.update.parts)
        if self.rehearsed:
            self.replacing, self.update = True, IncomingUpdate(self.update.manifest, lambda _, whole: whole)

    def qarl_replaced(self) -> None:
        """Serve what came again."""
        if self.update.problems():
            raise ValueError("; ".join(self.update.problems()))
        self.replacing = False

    def qarl_most_held(self) -> int:
        """Return how many tensors were held at most."""
        return self.most_held

    def qarl_abort(self) -> None:
        """Forget them."""
        self.update = None

    def qarl_served(self) -> dict[str, Tensor]:
        """Return the tensors served."""
        return self.served
