"""The router: BF16 logits, FP32 softmax and renormalization, FP32 weights, and routes recorded or replayed.

The rollout engine keeps router weights in FP32; replaying its chosen experts in the learner removes the flips that
near-equal router probabilities otherwise cause (R3).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

NO_ROUTE = -1
# One thread of the engine's kernel adds 16 bytes of BF16 logits.
_NEIGHBOURS = 8


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

    def same_again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts of a forward and its recomputation, which then replays what is replayed now."""
        return nullcontext(), self.replay(self.replayed)


class AlignedRouter(nn.Module):
    """weights = softmax_fp32(x W^T) of the chosen experts, renormalized in FP32; never quantized.

    Args:
        gate: the router to replace: `weight` [E, H], `top_k`, `num_experts`, `norm_topk_prob`.
        control: the model's route control.
        layer: position of this router among the model's routers.
    """

    def __init__(self, gate: Any, control: RouteControl, layer: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = gate.weight
        self.top_k: int = gate.top_k
        self.norm_topk_prob: bool = gate.norm_topk_prob
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
        logits = self.logits(rows)
        return logits, *self.choose(logits)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the router's logits: hidden_states [..., H] -> [..., E] in their dtype."""
        return nn.functional.linear(hidden_states, self.weight)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts with the largest logits, or those that are replayed.

        Args:
            logits: [T, E].

        Returns:
            weights [T, k] FP32, experts [T, k] int64.
        """
        routes = None if self.control.replayed is None else self.control.replayed[:, self.layer]
        weights, experts = route_tokens(logits, self.top_k, renormalize=self.norm_topk_prob, routes=routes)
        if self.control.recorded is not None:
            self.control.recorded.append(experts)
        return weights, experts


def route_tokens(
    logits: Tensor, top_k: int, *, renormalize: bool, routes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and weight them, with the rollout engine's bits.

    Args:
        logits: [T, E].
        top_k: k.
        renormalize: let the weights of a token sum to one.
        routes: [T, k] experts to take, `NO_ROUTE` where the logits choose; or None.

    Returns:
        weights [T, k] FP32, experts [T, k] int64, the largest logit first.
    """
    probabilities = engine_softmax(logits)
    # A stable sort keeps the lower expert first among equal probabilities, as the engine does; `topk` promises nothing.
    # A copy, because whoever keeps the choices would keep the order of all experts with them.
    experts = probabilities.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    if routes is not None:
        experts = torch.where(routes == NO_ROUTE, experts, routes.to(experts))
    weights = probabilities.gather(-1, experts)
    if renormalize:
        weights = weights / _sum_in_order(weights)[..., None]
    return weights, experts


def engine_softmax(logits: Tensor) -> Tensor:
    """Softmax in FP32 with the rollout engine's order of additions, so that router weights are its bits.

    Eight neighbours are added one after the other. Of the n sums that result, those at i and i + n/2 are added, and so
    on until one is left. Every exponential is multiplied by its reciprocal.

    Args:
        logits: [T, E]; the order is the engine's where E is a power of two from 8 to 256.

    Returns:
        [T, E] FP32.

    Source: vLLM 0.25.1 csrc/libtorch_stable/moe/topk_softmax_kernels.cu.
    """
    logits = logits.float()
    exponentials = (logits - logits.amax(-1, keepdim=True)).exp()
    num_experts = logits.shape[-1]
    if num_experts % _NEIGHBOURS or num_experts & (num_experts - 1):
        return exponentials * (1 / exponentials.sum(-1, keepdim=True))
    sums = _sum_in_order(exponentials.unflatten(-1, (-1, _NEIGHBOURS)))
    while sums.shape[-1] > 1:
        first, second = sums.chunk(2, dim=-1)
        sums = first + second
    return exponentials * (1 / sums)


def _sum_in_order(values: Tensor) -> Tensor:
    first, *others = values.unbind(-1)
    for other in others:
        first = first + other
    return first
