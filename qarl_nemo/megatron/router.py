"""Megatron's router with the rollout engine's arithmetic: logits in the model's dtype, FP32 from the softmax on."""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor, nn

from qarl_nemo.layers.router import route_tokens


class AlignedTopKRouter(TopKRouter):
    """weights = softmax_fp32(x W^T) of the k largest, renormalized in FP32 (`AlignedRouter`, for Megatron).

    Megatron's own router takes the softmax over the chosen logits only, and returns a dense map that loses the order in
    which a token chose its experts, which is the order in which the engine sums them. With `moe_enable_routing_replay`
    choices are recorded and replayed through Megatron's `RouterReplay`, in the given order; where a choice is -1, the
    router chooses itself.

    Attributes:
        chosen: [T, k] int64, the experts of the latest forward, most probable first.
        weights: [T, k] FP32, their weights.
    """

    # Tells Bridge, which does not know this class, that its weights are replicated.
    tensor_model_parallel = False

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 Megatron's name
        """Return logits in the model's dtype, whatever `moe_router_dtype` says: [S, B, H] -> [S, B, E]."""
        return nn.functional.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Choose experts.

        Args:
            logits: [S, B, E].
            padding_mask: used only by Megatron's load-balancing losses, which are off.

        Returns:
            weights [T, E] FP32, zero where an expert was not chosen; [T, E] bool, whether it was chosen.
        """
        logits = logits.view(-1, logits.shape[-1])
        weights, self.chosen = self._choose(logits)
        self.weights = weights.detach()
        dense = weights.new_zeros(logits.shape).scatter(-1, self.chosen, weights)
        return dense, torch.zeros_like(dense, dtype=torch.bool).scatter(-1, self.chosen, True)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        replay = self.router_replay
        action = None if replay is None else replay.router_replay_action
        routes = None
        if action is RouterReplayAction.REPLAY_FORWARD:
            routes = replay.target_topk_idx.contiguous()
        elif action is RouterReplayAction.REPLAY_BACKWARD:
            routes = replay.replay_backward_list.pop(0).contiguous()
        renormalize = not self.config.moe_router_pre_softmax
        weights, chosen = route_tokens(logits, self.topk, renormalize=renormalize, routes=routes)
        if action is RouterReplayAction.RECORD:
            replay.record_indices(chosen)
        return weights, chosen
