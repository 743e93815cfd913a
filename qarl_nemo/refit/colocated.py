"""A refit from all of the learner's ranks: all publish, rank 0 talks to the engines, and all learn how it ended.

Colocated engines read from the learner rank on their own GPU through CUDA IPC; separate ones get rank 0's tensors.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.engine import RolloutEngine
from qarl_nemo.refit.exchange import broadcast_plain, gather_plain, waiting_group
from qarl_nemo.refit.ipc import export_tensors, gpu_id, shareable
from qarl_nemo.refit.publish import Layer, StreamedUpdate, Update
from qarl_nemo.refit.push import push
from qarl_nemo.refit.send import TIMEOUT_S, Sender, messages


class ColocatedSender:
    """Lets every engine rank read from the learner rank on its own GPU; made on every rank of the learner.

    Args:
        timeout_s: how long to wait for an engine rank's answer before it is an error.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._held: dict[str, Tensor] = {}
        self._descriptions: dict[str, dict[str, Any]] = {}

    def lend(self, layers: Iterable[Layer]) -> Iterator[Layer]:
        """Yield each layer while engines may read it; called on every rank, and rank 0 sends what it yields.

        Args:
            layers: tensors on this rank's GPU by name, the same on every rank.

        Yields:
            The layers; each stays until all ranks request the next.
        """
        for layer in layers:
            self.share([{name: _apart(tensor) for name, tensor in layer.items()}])
            yield layer
            # Rank 0 requests the next layer only when all engines are done with this one.
            dist.barrier(group=waiting_group())
            self._held = {}

    def share(self, layers: Iterable[Layer]) -> None:
        """Let engines read these layers until the next ones, or `release`; called on every rank.

        Args:
            layers: tensors of this rank's GPU by name, the same on every rank, in memory that stays and that CUDA
                IPC can export.
        """
        self._held = {name: tensor for layer in layers for name, tensor in layer.items()}
        mine = export_tensors(self._held)
        # Not the whole device, where an optimizer may be leaving meanwhile.
        torch.cuda.current_stream().synchronize()
        self._descriptions = dict(gather_plain((gpu_id(torch.cuda.current_device()), mine), waiting_group()))

    def send(self, update: Update, engine: RolloutEngine) -> None:
        """Tell every engine rank where the tensors of the learner rank on its GPU are.

        Args:
            update: what `share` shares, or `lend` lends layer by layer.
            engine: all engines.

        Raises:
            ValueError: an engine rank runs on a GPU without a learner rank.
        """
        gpus = ask(engine, "qarl_gpu", timeout_s=self.timeout_s)
        for layers in messages(update):
            self._require_neighbours(gpus)
            message = {name: [self._descriptions[gpu][name] for gpu in gpus] for layer in layers for name in layer}
            ask(engine, "qarl_receive", update.manifest.version, "ipc", message, timeout_s=self.timeout_s)

    def release(self) -> None:
        """Release this rank's tensors, which no engine rank reads any more."""
        self._held = {}

    def _require_neighbours(self, gpus: list[str]) -> None:
        alone = [f"rank {rank} on {gpu}" for rank, gpu in enumerate(gpus) if gpu not in self._descriptions]
        if alone or len(set(gpus)) < len(gpus):
            raise ValueError(
                f"colocated engines need one learner rank on each of their GPUs: {', '.join(alone) or gpus}; set "
                "policy.generation.colocated.enabled=false to send through NCCL"
            )


def _apart(tensor: Tensor) -> Tensor:
    # Megatron keeps parameters in one buffer whose memory it frees to offload them, but exported memory must stay.
    whole = shareable(tensor)
    return whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes else whole


def push_from_all(update: Update, engine: RolloutEngine, sender: Sender) -> dict[str, float]:
    """Make the engines serve what all ranks of the learner published; called on every rank.

    Args:
        update: the same on every rank.
        engine: all engines; rank 0 talks to them.
        sender: this rank's sender; only rank 0's sends, all are released.

    Returns:
        Seconds of each phase as `<phase>_s`, `total_s` and `num_bytes`.

    Raises:
        RuntimeError: the refit was refused or broke off; every rank raises with rank 0's reason.
    """
    started = time.perf_counter()
    outcome: dict[str, float] | str | None = None
    try:
        # All ranks make a streamed update together, even if one of them gives up on it.
        with update if isinstance(update, StreamedUpdate) else nullcontext():
            if dist.get_rank() == 0:
                outcome = _attempt(update, engine, sender)
        if isinstance(outcome, str) and isinstance(update, StreamedUpdate) and update.broken:
            # No other rank will come to ask for the outcome: this task's failure tells the driver.
            raise RuntimeError(outcome)
        answer: dict[str, float] | str = broadcast_plain(outcome, waiting_group())
    except Exception as error:
        # A learner's rank is gone. If rank 0 had given up before, its reason is the more useful one.
        if isinstance(outcome, str):
            raise RuntimeError(outcome) from error
        raise
    finally:
        sender.release()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer | {"total_s": time.perf_counter() - started}


def _attempt(update: Update, engine: RolloutEngine, sender: Sender) -> dict[str, float] | str:
    try:
        report = push(update, engine, sender)
    except Exception as error:  # noqa: BLE001 the other ranks wait for the outcome, whatever it is
        return "\nbecause: ".join(map(_described, _causes(error)))
    seconds = {f"{phase}_s": value for phase, value in report.seconds.items()}
    return {**seconds, "num_bytes": float(report.num_bytes)}


def _described(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
