"""Megatron's MoE layer and expert MLP in the rollout engine's order of operations."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.block_recipe import recipe_rows
from qarl_nemo.megatron.dispatcher import DISPATCHERS
from qarl_nemo.megatron.rows_autograd import aligned_expert_rows


class AlignedMoELayer(MoELayer):
    """A Megatron MoE layer whose experts, router and sum compute what the rollout engine's do.

    Args:
        alignment: the model's.
        arguments: passed to `MoELayer`.
    """

    def __init__(self, *arguments: Any, alignment: Alignment, **named: Any) -> None:
        super().__init__(*arguments, **named)
        own = self.token_dispatcher
        self.token_dispatcher = DISPATCHERS[self.config.moe_token_dispatcher_type](
            self.num_local_experts,
            self.local_expert_indices,
            config=self.config,
            # The process groups of the dispatcher that Megatron just built, under the names that dispatchers read.
            pg_collection=SimpleNamespace(ep=own.ep_group, expt_tp=own.tp_group, tp_ep=own.tp_ep_group),
        )
        self.token_dispatcher.router = self.router
        self.token_dispatcher.format = alignment.format

    def set_layer_number(self, layer_number: int) -> None:
        """Give the layer's weights their published names; Megatron counts layers over all stages from 1."""
        super().set_layer_number(layer_number)
        experts = f"model.layers.{layer_number - 1}.mlp.experts"
        self.experts.linear_fc1.aligned.name = f"{experts}.gate_up_proj"
        self.experts.linear_fc2.aligned.name = f"{experts}.down_proj"


class AlignedGroupedMLP(TEGroupedMLP):
    """fc1 -> SwiGLU -> fc2 on quantized weights; the router weight comes after fc2, here or in the dispatcher.

    Megatron's class does not need Transformer-Engine itself: it uses whatever linears the spec gives it.
    """

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor | list[int],
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Apply this rank's experts.

        Args:
            permuted_local_hidden_states: [M, H] sorted by local expert.
            tokens_per_expert: [E_local].
            permuted_probs: [M] FP32 router weights.

        Returns:
            [M, H] for the dispatcher's sum; no bias.
        """
        counts = torch.as_tensor(tokens_per_expert, dtype=torch.int32)
        if self.linear_fc1.backend == "transformer_engine":
            linears, fmt = (self.linear_fc1, self.linear_fc2), self.linear_fc1.aligned.format
            return recipe_rows(permuted_local_hidden_states, permuted_probs, counts.tolist(), *linears, fmt), None
        offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        out = aligned_expert_rows(
            permuted_local_hidden_states,
            permuted_probs,
            offsets.to(permuted_local_hidden_states.device, non_blocking=True),
            # Called as modules, so that Megatron's forward hooks have gathered the parameters.
            self.linear_fc1(),
            self.linear_fc2(),
            backward=self.linear_fc1.backward,
        )
        return out, None
