"""The targets of refit faults: engines whose messages can be spoiled and which show what they serve."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from rank_processes import RankProcesses

from qarl_kernels import get_format
from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.publish import Layer, RefitUpdate
from qarl_nemo.refit.send import CollectiveSender, Sender

TIMEOUT_S = 2.0
# The longest time a failing push may take: its wait, the ranks' extra time, the abort's wait, and a busy machine.
PATIENCE_S = TIMEOUT_S + 5.0 + TIMEOUT_S + 20.0
Meddling = Callable[[str, tuple[Any, ...]], list[Any]]


class Meddled:
    """An engine that can be sent one spoiled message.

    Args:
        engine: what `push` takes.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.arm(0)

    def arm(self, number: int, meddling: Meddling | None = None, *, lasting: bool = False) -> None:
        """Send a message to something other than the engine.

        Args:
            number: which message, from 1 on, counted from now; 0 lets all through.
            meddling: takes its method and arguments, and answers.
            lasting: let all that follow meet it, too.
        """
        self.calls: list[str] = []
        self._number, self._meddling, self._lasting = number, meddling, lasting

    def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank, or meddle with the call."""
        self.calls.append(method)
        number = len(self.calls)
        if self._meddling is not None and (number == self._number or (self._lasting and number > self._number)):
            return self._meddling(method, args)
        return self.engine.collective_rpc(method, args=args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Target(Protocol):
    """An engine with a learner's two updates."""

    engine: Meddled
    # Methods of a push that can be called twice with the same arguments.
    repeatable: tuple[str, ...]

    def next(self, name: str) -> RefitUpdate:
        """Return update `A` or `B` as a version that no update had before."""

    def sender(self, timeout_s: float) -> Sender:
        """Return a sender whose waits are bounded."""

    def weights(self) -> Any:
        """Return what the engine shows of its weights; equal for equal weights."""

    def stopped(self) -> AbstractContextManager[None]:
        """Stop a rank, and let it go on."""

    def kill(self) -> None:
        """Kill a rank."""

    def forget_dead(self) -> None:
        """Let calls reach the ranks that are left."""

    def restart(self) -> None:
        """Start the engine anew."""


class RanksTarget:
    """Receiving halves of two ranks as processes, and a sender over gloo."""

    repeatable = ("qarl_version", "qarl_connect", "qarl_begin", "qarl_receive", "qarl_verify", "qarl_replace")

    def __init__(self) -> None:
        self.version = 0
        generator = torch.Generator().manual_seed(0)
        self.layers = {name: _layers(generator) for name in "AB"}
        self.processes = RankProcesses(2)
        self.engine = Meddled(self.processes)

    def next(self, name: str) -> RefitUpdate:
        """Return update `A` or `B` as the next version."""
        self.version += 1
        return RefitUpdate.of(self.layers[name], get_format("bf16"), version=self.version)

    def sender(self, timeout_s: float) -> CollectiveSender:
        """Return a sender that connects anew."""
        return CollectiveSender(2, torch.device("cpu"), backend="gloo", timeout_s=timeout_s)

    def weights(self) -> list[dict[str, int]]:
        """Return the checksums that ranks serve, only once if all serve the same."""
        found = ask(self.engine, "qarl_digests", timeout_s=60)
        return found[:1] if all(one == found[0] for one in found) else found

    def stopped(self) -> AbstractContextManager[None]:
        """Stop the second rank."""
        return self.processes.stopped(1)

    def kill(self) -> None:
        """Kill the second rank."""
        self.processes.kill(1)

    def forget_dead(self) -> None:
        """Call only the first rank."""
        self.processes.forget_dead()

    def restart(self) -> None:
        """Start both ranks anew."""
        self.processes.close()
        self.processes = RankProcesses(2)
        self.engine = Meddled(self.processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.close()


def _layers(generator: torch.Generator) -> list[Layer]:
    first, second = (
        {f"model.layers.{layer}.self_attn.q_norm.weight": torch.rand(7, generator=generator)} for layer in range(2)
    )
    codes = torch.randint(-(2**31), 2**31 - 1, (4, 6, 5), dtype=torch.int32, generator=generator)
    second["model.layers.1.mlp.experts.down_proj.weight_packed"] = codes
    return [first, second, {"model.norm.weight": torch.rand(9, generator=generator)}]
