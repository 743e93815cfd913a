"""The senders of the refit tests, and two that fail as a network or a learner may."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qarl_kernels import QuantFormat
from qarl_nemo.refit.publish import RefitUpdate, StreamedUpdate
from qarl_nemo.refit.send import CollectiveSender, DirectSender, FileSender, IpcSender
from support.refit.cases import EngineCase


def make_sender(case: EngineCase, device: str, scratch: Path, timeout_s: float | None = None) -> Any:
    """Return the case's sender, for tensors on `device`; None leaves it its own limit on each wait."""
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    if case.sender == "collective":
        settings = {"backend": "gloo", "timeout_s": 10.0} if case.device == "cpu" else {}
        return CollectiveSender(case.tensor_parallel, torch.device(device), **settings | limit)
    if case.sender == "file":
        return FileSender(scratch / "refits", **limit)
    return DirectSender() if case.sender == "direct" else IpcSender(**limit)


def rehearsed(update: RefitUpdate, fmt: QuantFormat, *, spoiled: str = "", in_pieces: bool = False) -> StreamedUpdate:
    """Return the same update as a learner of shards sends it, layer by layer.

    Args:
        update: the update.
        fmt: its format.
        spoiled: a tensor that is served otherwise than it was rehearsed.
        in_pieces: send every other tensor of a layer after the rest of it.
    """
    layers = update.layers
    if in_pieces:
        layers = [dict(list(layer.items())[first::2]) for layer in update.layers for first in range(2)]
    passes: list[None] = []

    def stream() -> Iterator[dict[str, Tensor]]:
        passes.append(None)
        for layer in layers:
            # Made anew each time, and gone when the next one is.
            made = {name: tensor.clone() for name, tensor in layer.items()}
            if spoiled in made and len(passes) == 3:
                made[spoiled] += 1
            yield made
            made.clear()

    return StreamedUpdate(stream, fmt, version=update.manifest.version, rehearsed=True)


def with_stranger(update: RefitUpdate, fmt: QuantFormat, name: str) -> StreamedUpdate:
    """Return the same update as a stream that sends one tensor more than it announced."""
    passes: list[None] = []

    def stream() -> Iterator[dict[str, Tensor]]:
        passes.append(None)
        if len(passes) == 2:
            yield {name: torch.ones(3)}
        yield from update.layers

    return StreamedUpdate(stream, fmt, version=update.manifest.version)


class CutSender:
    """Breaks off after some tensors."""

    def __init__(self, sender: Any, count: int) -> None:
        self.sender, self.count, self.timeout_s = sender, count, sender.timeout_s

    def send(self, update: RefitUpdate, engine: Any) -> None:
        first = dict(list(update.tensors.items())[: self.count])
        self.sender.send(RefitUpdate(update.manifest, [first]), engine)
        raise ConnectionError(f"cut after {self.count} tensors")

    def release(self) -> None:
        self.sender.release()


class RepeatingSender:
    """Sends one tensor again."""

    def __init__(self, sender: Any, name: str) -> None:
        self.sender, self.name, self.timeout_s = sender, name, sender.timeout_s

    def send(self, update: RefitUpdate, engine: Any) -> None:
        self.sender.send(update, engine)
        self.sender.send(RefitUpdate(update.manifest, [{self.name: update.tensors[self.name]}]), engine)

    def release(self) -> None:
        self.sender.release()
