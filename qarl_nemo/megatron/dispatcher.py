"""Megatron's token dispatchers with the rollout engine's sum: every row returns to its token's rank, which adds them.

Megatron multiplies the router weight into fc2's input, and sums a token's rows in BF16 or partly on each expert's rank.
Here the rows that are sent are what the engine's fc2 writes, rounded, and they are summed where the router's order and
weights are: in FP32, first choice first. Under expert tensor parallelism a row is the rounded FP32 sum of its shards'
rounded rows; nothing else depends on the layout.

Once the rows are summed, a dispatcher forgets the batch. A recomputed layer's router weights carry their graph, which
holds the layer's input and its gradient; Megatron keeps them in every layer until its next forward. For Qwen3-30B-A3B
and micro-batches of 18,000 tokens that was 9 GiB a rank, during rollouts, too.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch import Tensor

from qarl_kernels import QuantFormat, route_rows
from qarl_nemo.megatron.router import AlignedTopKRouter
from qarl_nemo.megatron.rows_autograd import combine_tokens

_OF_THE_BATCH = (
    "probs",
    "local_probs",
    "routing_map",
    "local_map",
    "reversed_local_input_permutation_mapping",
    "topk_weight",
    "inverse",
    "slots",
)


class AlignedAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with the engine's sum as its last step; the layer sets `router` and `format`."""

    router: AlignedTopKRouter
    format: QuantFormat

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Remember where each choice's row will return to, then sort rows by expert as Megatron does."""
        self.topk_weight = self.router.weights
        self.inverse = route_rows(self.router.chosen, self.router.num_experts).inverse
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sum the returned rows: [T * k, H] sorted by expert -> [S, B, H]."""
        out = combine_tokens(permutated_local_input_tokens, self.inverse, self.topk_weight, self.format)
        _forget_batch(self)
        return out.view(self.hidden_shape)


class AlignedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's dispatcher, which returns a slot for each choice; the layer sets `router` and `format`.

    Megatron reduces one FP32 partial sum per token, this reduces k rows: prefer alltoall if k is large.
    """

    router: AlignedTopKRouter
    format: QuantFormat

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Remember the slot of each choice: a token's slots are in the order of its experts' numbers."""
        chosen = self.router.chosen
        num_tokens, top_k = chosen.shape
        first_slot = torch.arange(num_tokens, device=chosen.device).unsqueeze(-1) * top_k
        self.topk_weight = self.router.weights
        self.inverse = (first_slot + chosen.argsort(-1).argsort(-1)).flatten()
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """Number every token's slots, before Megatron forgets the gathered map."""
        self.slots = self.routing_map.cumsum(-1) - 1
        return super().dispatch_postprocess(hidden_states, probs)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Put this rank's rows into their slots: [M, H] sorted by expert -> [T_all * k, H], zero elsewhere."""
        top_k = self.router.topk
        expert, token = self.local_map.T.nonzero(as_tuple=True)
        slot = token * top_k + self.slots[token, self.local_expert_indices[0] + expert]
        out = hidden_states.new_zeros(len(self.slots) * top_k, hidden_states.shape[-1])
        return out.index_copy(0, slot, hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Send every slot to its token's rank; all but the ranks with its expert (several under ETP) add zero."""
        if self.tp_size == 1 and self.ep_size == 1:
            return hidden_states
        wire = hidden_states if self.tp_size == 1 else hidden_states.float()
        return reduce_scatter_to_sequence_parallel_region(wire, group=self.tp_ep_group).to(hidden_states.dtype)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the slots: [T * k, H] -> [S, B, H]."""
        out = combine_tokens(hidden_states, self.inverse, self.topk_weight, self.format)
        _forget_batch(self)
        return out.view(self.hidden_shape)


def _forget_batch(dispatcher: Any) -> None:
    for name in _OF_THE_BATCH:
        if isinstance(getattr(dispatcher, name, None), Tensor):
            setattr(dispatcher, name, None)


DISPATCHERS = {"alltoall": AlignedAlltoAllDispatcher, "allgather": AlignedAllGatherDispatcher}
