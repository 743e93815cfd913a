"""The receiving half of a refit as one rank has it, with no engine around it: what transports are tested against."""

import torch
from torch import Tensor

from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.calls import RankCalls
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
class ReceivingRank(RankCalls):
    """Takes updates in, checks them and holds what was served last."""

    def __init__(self, rank: int = 0) -> None:
        self._own = rank
        self.session = PlainSession(rank)

    def _qarl_session(self) -> PlainSession:
        return self.session

    def qarl_place(self, first_rank: int) -> None:
        """Number the rank among those of all engines."""
        self.session.arrivals.rank = first_rank + self._own

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
