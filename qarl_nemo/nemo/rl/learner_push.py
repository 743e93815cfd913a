"""A refit from all of the learner's ranks: every rank publishes, rank 0 speaks with the engines, all learn how it ended.

Colocated engines read the learner rank on their own GPU through CUDA IPC; separate ones are sent rank 0's tensors.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qarl_nemo.refit.ipc import export_tensor, gpu_id
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.refit.push import push
from qarl_nemo.refit.send import RolloutEngine, Sender


class ColocatedSender:
    """Every rank of the engines reads the learner rank on its own GPU.

    Args:
        descriptions: GPU -> tensor name -> what that GPU's learner rank exported.
    """

    def __init__(self, descriptions: dict[str, dict[str, Any]]) -> None:
        self.descriptions = descriptions

    @classmethod
    def of_all_ranks(cls, tensors: dict[str, Tensor]) -> "ColocatedSender":
        """Export this rank's tensors and gather what all ranks exported; called on every rank.

        Args:
            tensors: contiguous, on this rank's GPU; they stay until the refit is over.

        Returns:
            The sender, the same on every rank.
        """
        mine = (gpu_id(torch.cuda.current_device()), {name: export_tensor(tensor) for name, tensor in tensors.items()})
        torch.cuda.synchronize()
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, mine)
        return cls(dict(held))

    def send(self, update: RefitUpdate, engine: RolloutEngine) -> None:
        """Tell every rank where the tensors of its GPU's learner rank lie.

        Args:
            update: what was exported.
            engine: all engines.

        Raises:
            ValueError: a rank of the engines runs on a GPU that no learner rank is on.
        """
        gpus = engine.collective_rpc("qarl_gpu")
        alone = [f"rank {rank} on {gpu}" for rank, gpu in enumerate(gpus) if gpu not in self.descriptions]
        if alone or len(set(gpus)) < len(gpus):
            raise ValueError(
                f"colocated engines need one learner rank on each of their GPUs: {', '.join(alone) or gpus}; set "
                "policy.generation.colocated.enabled=false to send through NCCL"
            )
        message = {name: [self.descriptions[gpu][name] for gpu in gpus] for name in update.tensors}
        engine.collective_rpc("qarl_receive", args=("ipc", message))

    def release(self) -> None:
        """Nothing is held here: every rank keeps its own tensors until the end."""


def push_from_all(
    update: RefitUpdate, engine: RolloutEngine, sender: Callable[[dict[str, Tensor]], Sender]
) -> dict[str, float]:
    """Let the engines serve what all ranks of the learner published; called on every rank.

    Args:
        update: whole, the same on every rank.
        engine: all engines; rank 0 speaks with them.
        sender: makes the sender from contiguous tensors, on every rank.

    Returns:
        Seconds of each phase as `<phase>_s`, `total_s` and `num_bytes`.

    Raises:
        RuntimeError: the refit was refused or broke off; rank 0's reason, on every rank.
    """
    started = time.perf_counter()
    whole = {name: tensor.contiguous() for name, tensor in update.tensors.items()}
    update, made = RefitUpdate(update.manifest, whole), sender(whole)
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        outcome = [_attempt(update, engine, made)]
    dist.broadcast_object_list(outcome, src=0)
    del whole, update
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
    if isinstance(outcome[0], str):
        raise RuntimeError(outcome[0])
    return outcome[0] | {"total_s": time.perf_counter() - started}


def _attempt(update: RefitUpdate, engine: RolloutEngine, sender: Sender) -> dict[str, float] | str:
    try:
        report = push(update, engine, sender)
    except Exception as error:  # noqa: BLE001 the other ranks wait for the outcome, whatever it is
        causes = [error, *_causes(error)]
        return "\nbecause: ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
    seconds = {f"{phase}_s": value for phase, value in report.seconds.items()}
    return {**seconds, "num_bytes": float(report.num_bytes)}


def _causes(error: BaseException) -> list[BaseException]:
    causes = []
    while (error := error.__cause__ or error.__context__) is not None:
        causes.append(error)
    return causes
