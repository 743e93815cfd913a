"""Workers for NeMo-RL's own worker groups, on a CPU: learner ranks and engines around the real halves of a refit."""

import asyncio
import os
from typing import Any

import ray
import torch
import torch.distributed as dist
from receiving_rank import ReceivingRank
from torch import Tensor

from qarl_kernels import get_format
from qarl_nemo.nemo_rl.engines import RayEngines
from qarl_nemo.refit.colocated import push_from_all
from qarl_nemo.refit.publish import StreamedUpdate
from qarl_nemo.refit.send import CollectiveSender

CPU = torch.device("cpu")


def weights(version: int) -> dict[str, Tensor]:
    """What the learner publishes as a version."""
    generator = torch.Generator().manual_seed(version)
    names = [f"model.layers.{layer}.mlp.experts.down_proj.weight_packed" for layer in range(3)]
    return {name: torch.randint(-9, 9, (4, 8), dtype=torch.int32, generator=generator) for name in names}


class LearnerImpl:
    """A learner rank; an asynchronous actor, as NeMo-RL's Megatron workers are."""

    def __init__(self, config: dict[str, Any], **_: Any) -> None:
        self.dies_at, self.poisoned_at = config["dies_at"], config.get("poisoned_at")
        self.published: StreamedUpdate | None = None
        dist.init_process_group("gloo")
        self.sender: CollectiveSender | None = None

    async def ready(self) -> bool:
        """Make this an asynchronous actor."""
        return True

    def qarl_publish(self, version: int, step: int) -> None:
        """Publish before the engines are awake."""
        if version == self.poisoned_at:
            raise ValueError("weights hold NaN")
        self.published = self.update(version)

    def update(self, version: int) -> StreamedUpdate:
        """What this rank publishes."""
        return StreamedUpdate(lambda: [weights(version)], get_format("w4a16"), version=version)

    def qarl_refit(self, engines: list[Any], num_ranks: int, version: int, step: int) -> dict[str, float]:
        """Refit all engines from all ranks; the last rank may die on the way."""
        if version == self.dies_at and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(1)
        self.sender = self.sender or CollectiveSender(num_ranks, CPU, backend="gloo", timeout_s=60.0)
        update, self.published = self.published or self.update(version), None
        return push_from_all(update, RayEngines(engines), self.sender)


class EngineImpl(ReceivingRank):
    """A one-rank engine without vLLM; an asynchronous actor, as NeMo-RL's asynchronous engine is."""

    def __init__(self, config: dict[str, Any], **_: Any) -> None:
        super().__init__()

    async def qarl_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of the rank."""
        return [await asyncio.to_thread(getattr(self, method), *args)]

    async def forget(self) -> None:
        """Serve nothing until the next refit, as an engine that slept."""
        self._qarl_session().stop_serving()

    async def qarl_busy(self) -> bool:
        """No request is ever under way."""
        return False

    async def qarl_reset_prefix_cache(self) -> bool:
        """There is none."""
        return True


@ray.remote
class Learner(LearnerImpl):
    """What NeMo-RL starts."""


@ray.remote
class Engine(EngineImpl):
    """What NeMo-RL starts."""
