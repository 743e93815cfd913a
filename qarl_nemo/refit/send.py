"""Four ways in which an update's tensors reach the ranks of an engine, with one protocol.

A sender calls the ranks' `qarl_receive(version, kind, message)`, where `message` has types that msgpack can hold;
`arrive.py` has the ranks' half of each way. Every rank is offered whole tensors and keeps its part.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.collective import broadcast, listening_store, make_group
from qarl_nemo.refit.engine import RolloutEngine
from qarl_nemo.refit.ipc import export_tensors, shareable
from qarl_nemo.refit.publish import Layer, Update
from qarl_nemo.refit.waiting import in_background, within

TIMEOUT_S = 120.0
# Extra time in which ranks whose own wait has timed out can say so themselves.
_GRACE_S = 5.0


class Sender(Protocol):
    """One way to the engine's ranks."""

    @property
    def timeout_s(self) -> float | None:
        """How long each answer of the ranks may take, in seconds; None if they are in this process."""

    def send(self, update: Update, engine: RolloutEngine) -> None:
        """Bring every tensor of `update` to every rank."""

    def release(self) -> None:
        """Free what was held for the ranks to read; called when they are done or the refit has failed."""


class DirectSender:
    """For an engine in this process, whose rank gets the learner's tensors themselves."""

    timeout_s = None

    def send(self, update: Update, engine: RolloutEngine) -> None:
        """Hand every tensor over.

        Raises:
            ValueError: the engine runs in other processes.
        """
        if ask(engine, "qarl_process") != [os.getpid()]:
            raise ValueError(
                "DirectSender reaches one engine rank in this process; use IpcSender, or start vLLM with "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 and tensor_parallel_size=1"
            )
        for layer in update.layer_by_layer():
            ask(engine, "qarl_receive", update.manifest.version, "direct", layer)

    def release(self) -> None:
        """Nothing is held."""


class IpcSender:
    """For an engine with processes on this host, which read the learner's GPU memory through CUDA IPC.

    Args:
        timeout_s: how long to wait for a rank's answer before it is an error.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._held: list[Tensor] = []

    def send(self, update: Update, engine: RolloutEngine) -> None:
        """Tell every rank where the tensors are.

        Args:
            update: its tensors are on GPUs and stay as they are until `release`; if it is streamed, each rank copies
                its part of a layer before the next one is made.
            engine: an engine on this host.

        Raises:
            ValueError: tensors are not on a GPU; all are named.
        """
        # Each rank needs a description of its own, because exported memory counts its readers.
        num_ranks = len(ask(engine, "qarl_process", timeout_s=self.timeout_s))
        for layers in messages(update):
            descriptions = self._export(layers, num_ranks)
            # In a rehearsal a rank is done with a layer when it answers, so it need not copy.
            kind = "ipc" if update.stays or update.rehearsed else "ipc_copied"
            ask(engine, "qarl_receive", update.manifest.version, kind, descriptions, timeout_s=self.timeout_s)
            if not update.stays:
                self._held = []

    def _export(self, layers: Iterable[Layer], num_ranks: int) -> dict[str, list[dict[str, Any]]]:
        tensors = {name: tensor for layer in layers for name, tensor in layer.items()}
        _require_on_gpu(tensors)
        whole = {name: shareable(tensor) for name, tensor in tensors.items()}
        self._held = list(whole.values())
        exported = [export_tensors(whole) for _ in range(num_ranks)]
        descriptions = {name: [of_rank[name] for of_rank in exported] for name in whole}
        torch.cuda.synchronize()
        return descriptions

    def release(self) -> None:
        """Release the tensors, which no rank reads any more."""
        self._held = []
        torch.cuda.ipc_collect()


class FileSender:
    """The ranks read a safetensors file, which stays: for debugging, and for engines that nothing else reaches.

    Args:
        folder: a folder that learner and engine both see.
        timeout_s: how long to wait for a rank's answer before it is an error.
    """

    def __init__(self, folder: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self.folder = Path(folder)
        self.timeout_s = timeout_s

    def send(self, update: Update, engine: RolloutEngine) -> None:
        """Write `refit-<version>.safetensors` and have every rank read it."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"refit-{update.manifest.version}.safetensors"
        unfinished = path.with_suffix(".partial")
        tensors = {name: tensor.detach().cpu() for layer in update.layer_by_layer() for name, tensor in layer.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)
        unfinished.replace(path)
        message = {"path": str(path)}
        ask(engine, "qarl_receive", update.manifest.version, "file", message, timeout_s=self.timeout_s)

    def release(self) -> None:
        """The file stays."""


class CollectiveSender:
    """For an engine on other GPUs or hosts: tensors are broadcast layer by layer through NCCL (or gloo, on CPUs).

    Args:
        num_ranks: number of ranks in the engine.
        device: where the learner's tensors are.
        backend: `nccl` or `gloo`.
        host: address of this machine that every rank reaches; this process listens on no other.
        timeout_s: how long to wait for a rank's answer, or its part in a broadcast, before it is an error.
    """

    def __init__(
        self,
        num_ranks: int,
        device: torch.device,
        *,
        backend: str = "nccl",
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.num_ranks = num_ranks
        self.device = device
        self.backend = backend
        self.host = host
        self.timeout_s = timeout_s
        self._group: Any = None

    def send(self, update: Update, engine: RolloutEngine) -> None:
        """Broadcast every tensor, one layer at a time.

        Args:
            update: what to send.
            engine: an engine with `num_ranks` ranks.

        Raises:
            RuntimeError: a rank failed or did not take part in time.
            TimeoutError: a rank did not answer.
        """
        if self._group is None:
            self._group = self._connect(engine)
        try:
            for layer in update.layer_by_layer():
                self._broadcast(update.manifest.version, layer, engine)
        except BaseException:
            # A rank that missed one broadcast would mistake the next one for it, so the next update connects anew.
            self._group = None
            raise

    def release(self) -> None:
        """Nothing is held; the connection stays for the next update, unless this one broke off."""

    def _broadcast(self, version: int, layer: Mapping[str, Tensor], engine: RolloutEngine) -> None:
        tensors = [tensor.detach().to(self.device).contiguous() for tensor in layer.values()]
        call = ("qarl_receive", version, "collective", {"names": list(layer)})
        group = self._group
        self._together(engine, call, lambda: broadcast(group, tensors))

    def _connect(self, engine: RolloutEngine) -> Any:
        store = listening_store(self.host, self.timeout_s)
        settings = {"size": self.num_ranks + 1, "backend": self.backend, "timeout_s": self.timeout_s}
        message = {"host": self.host, "port": store.port, **settings}
        call = ("qarl_connect", message)
        return self._together(engine, call, lambda: make_group(store, 0, host=self.host, **settings))

    def _together(self, engine: RolloutEngine, call: tuple[Any, ...], here: Callable[[], Any]) -> Any:
        # The ranks do their half inside the call, so it must be under way while this process does its own.
        patience = self.timeout_s + _GRACE_S
        there = in_background(lambda: ask(engine, *call, timeout_s=patience))
        try:
            # NCCL waits for a rank's first broadcast without a timeout of its own.
            result = within(patience, f"the group of {self.num_ranks} ranks", self._on_my_stream(here), owner=self)
        except Exception:
            # If a rank has refused, that is the reason why this half failed.
            there.result()
            raise
        there.result()
        return result

    def _on_my_stream(self, here: Callable[[], Any]) -> Callable[[], Any]:
        # A new thread starts on the first GPU and its default stream.
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def call() -> Any:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return here()

        return call


def messages(update: Update) -> Iterator[list[Layer]]:
    """Yield the layers of each message: all of an update that stays in memory, otherwise one at a time."""
    layers = update.layer_by_layer()
    if update.stays:
        yield list(layers)
        return
    for layer in layers:
        yield [layer]


def _require_on_gpu(tensors: Mapping[str, Tensor]) -> None:
    elsewhere = [name for name, tensor in tensors.items() if not tensor.is_cuda]
    if elsewhere:
        raise ValueError(f"CUDA IPC shares GPU memory, these tensors are not on a GPU: {', '.join(elsewhere)}")
