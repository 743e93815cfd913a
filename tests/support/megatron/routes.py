"""Router replay through Megatron, so that layouts whose sums differ in the last bits choose the same experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.megatron.models import DEVICE

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplayAction


def this_context_rank(batch: Tensor, documents: int) -> Tensor:
    """Return a rank's tokens [..., S / CP] of every document: from both ends, since attention costs more at the end."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return batch
    parts = [document.chunk(2 * size, -1) for document in batch.chunk(documents, -1)]
    return torch.cat([part for each in parts for part in (each[rank], each[2 * size - 1 - rank])], -1)


class Routes(dict):
    """(Sequence, layer) -> [S, k] experts, the first time as the routers choose, then replayed: no choice flips."""

    def before(self, model: nn.Module, sequence: int, documents: int) -> None:
        """Give this stage's routers the sequence's routes for this rank's tokens."""
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        for layer in model.module.decoder.layers:
            routes = self.get((sequence, layer.layer_number))
            if routes is not None:
                replay = layer.mlp.router.router_replay
                replay.set_target_indices(this_context_rank(routes.T, documents).T.chunk(size)[rank].contiguous())
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def after(self, model: nn.Module, sequence: int) -> None:
        """Keep what the routers chose, unless it was given to them."""
        for layer in model.module.decoder.layers:
            self.setdefault((sequence, layer.layer_number), layer.mlp.router.chosen)

    def share(self) -> None:
        """Give every rank every sequence's routes."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {key: routes.cpu() for key, routes in self.items()})
        for routes in everyone:
            self.update({key: route.to(DEVICE) for key, route in routes.items()})
