"""A dense MLP on quantized weights, for targets that include `mlp`."""

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from qarl_nemo.layers.engine_rounding import swiglu


class AlignedMLP(MLP):
    """y = fc2(silu(gate) up), (gate, up) = fc1(x), each factor rounded as the engine rounds it.

    Megatron's own MLP would fuse the activation and round once.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """Apply this rank's part of the MLP: [S, B, H] -> [S, B, H]; no bias."""
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, dim=-1)
        return self.linear_fc2(swiglu(gate, up))
