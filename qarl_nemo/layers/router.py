"""The router: BF16 logits, FP32 softmax and renormalization, FP32 weights, and routes recorded or replayed.

The rollout engine keeps router weights in FP32; replaying its chosen experts in the learner removes the flips that
near-equal router probabilities otherwise cause (R3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NO_ROUTE = -1


class RouteControl:
    """What all routers of one model share: the routes to replay, and the routes recorded.

    Attributes:
        replayed: [T, L, k] expert of each choice, `NO_ROUTE` where the router chooses itself; or None.
        recorded: one [T, k] tensor for each layer run since `record` began; or None.
    """

    def __init__(self) -> None:
        self.replayed: Tensor | None = None
        self.recorded: list[Tensor] | None = None

    @contextmanager
    def record(self) -> Iterator[list[Tensor]]:
        """Collect each layer's chosen experts, [T, k] a layer, in layer order."""
        self.recorded = []
        try:
            yield self.recorded
        finally:
            self.recorded = None

    @contextmanager
    def replay(self, routes: Tensor | None) -> Iterator[None]:
        """Make every router choose `routes` [T, L, k]; None leaves the choice to the routers."""
        self.replayed = routes
        try:
            yield
        finally:
            self.replayed = None


class AlignedRouter(nn.Module):
    """weights = softmax_fp32(x W^T) of the chosen experts, renormalized in FP32; never quantized.

    Args:
        gate: the router to replace: `weight` [E, H], `top_k`, `num_experts`, `norm_topk_prob`.
        control: the model's route control.
        layer: position of this router among the model's routers.
    """

    def __init__(self, gate: nn.Module, control: RouteControl, layer: int) -> None:
        super().__init__()
        self.weight = gate.weight
        self.top_k = gate.top_k
        self.num_experts = gate.num_experts
        self.norm_topk_prob = gate.norm_topk_prob
        self.control = control
        self.layer = layer

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts.

        Args:
            hidden_states: [T, H].

        Returns:
            logits [T, E] in hidden_states' dtype, weights [T, k] FP32, experts [T, k] int64.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(rows, self.weight)
        probabilities = logits.float().softmax(-1)
        experts = probabilities.topk(self.top_k, dim=-1).indices
        if self.control.replayed is not None:
            routes = self.control.replayed[:, self.layer].to(experts)
            experts = torch.where(routes == NO_ROUTE, experts, routes)
        if self.control.recorded is not None:
            self.control.recorded.append(experts)
        weights = probabilities.gather(-1, experts)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts
