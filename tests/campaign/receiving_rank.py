"""The receiving half of a refit as one rank has it, with no engine around it: what transports are tested against."""

import os
from typing import Any

import torch
from torch import Tensor

from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.manifest import Manifest, checksums
from qarl_nemo.refit.session import Parts, RankSession


class PlainSession(RankSession):
    """Serves whatever it is sent, on a CPU.

    Args:
        rank: in its engine.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__(Arrivals(rank, torch.device("cpu")))
        self.served: dict[str, Tensor] = {}
        self.most_held = 0

    def refusals(self, manifest: Manifest, *, rehearsed: bool) -> list[str]:
        """Take every layout."""
        return []

    def layer_of(self, name: str) -> str:
        """Install each tensor by itself."""
        return name

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Keep everything, and remember how much that is."""
        self.most_held = max(self.most_held, len(self._update.layers) + 1)
        return whole

    def install(self, layers: dict[str, Parts]) -> None:
        """Serve copies, as a learner may change what it sent."""
        self.served |= {name: part.clone() for parts in layers.values() for name, part in parts.items()}


@answering
class ReceivingRank:
    """Takes updates in, checks them and holds what was served last; its methods are those that `push` calls."""

    def __init__(self, rank: int = 0) -> None:
        self._own = rank
        self.session = PlainSession(rank)

    def qarl_process(self) -> int:
        """Return this process."""
        return os.getpid()

    def qarl_place(self, first_rank: int) -> None:
        """Number the rank among those of all engines."""
        self.session.arrivals.rank = first_rank + self._own

    def qarl_version(self) -> dict[str, Any]:
        """Return what is served."""
        return self.session.state()

    def qarl_connect(self, message: dict[str, Any]) -> None:
        """Join the learner's group."""
        self.session.arrivals.connect(message)

    def qarl_begin(self, manifest: dict[str, Any], rehearsed: bool) -> list[str]:
        """Expect an update."""
        return self.session.begin(manifest, rehearsed)

    def qarl_receive(self, version: int, kind: str, message: Any) -> None:
        """Take tensors in."""
        self.session.receive(version, kind, message)

    def qarl_verify(self, version: int) -> list[str]:
        """Check them."""
        return self.session.verify(version)

    def qarl_replace(self, version: int) -> None:
        """Serve them."""
        self.session.replace(version)

    def qarl_replaced(self, version: int) -> None:
        """Serve what came again."""
        self.session.finish(version)

    def qarl_abort(self, version: int) -> None:
        """Forget them."""
        self.session.abort(version)

    def qarl_most_held(self) -> int:
        """Return how many tensors were held at most."""
        return self.session.most_held

    def qarl_digests(self) -> dict[str, int]:
        """Return the checksum of every tensor that is served."""
        served = self.qarl_served()
        return dict(zip(served, checksums(served.values()), strict=True))

    def qarl_served(self) -> dict[str, Tensor]:
        """Return the tensors served."""
        if not self.session.whole:
            raise RuntimeError("this rank's last refit broke off: it answers nobody")
        return self.session.served
