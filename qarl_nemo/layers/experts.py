"""The routed experts of one layer, executed on their quantized weights in the rollout engine's order of operations."""

from torch import Tensor, nn

from qarl_kernels import QuantFormat
from qarl_nemo.layers.expert_autograd import aligned_expert_mlp
from qarl_nemo.layers.lora import AdaptersOfExperts
from qarl_nemo.layers.weight import AlignedWeight, ExecutedWeight, MasterChanges, require_backward
from qarl_nemo.names import Backward


class AlignedExperts(nn.Module):
    """fc1 -> SwiGLU -> fc2 -> router weight -> sum; takes over the stacked parameters of the experts it replaces.

    Args:
        experts: module with `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I].
        fmt: the format to execute.
        changes: counts the changes of the model's masters.
        name: the module's name in the model.
        backward: which weight the input gradient uses.
        keep_operand: see `AlignedWeight`.

    Raises:
        ValueError: unknown backward mode.
    """

    def __init__(
        self,
        experts: nn.Module,
        fmt: QuantFormat,
        changes: MasterChanges,
        *,
        name: str = "experts",
        backward: Backward = "dequantized",
        keep_operand: bool = True,
    ) -> None:
        super().__init__()
        require_backward(backward)
        self.gate_up_proj = experts.get_parameter("gate_up_proj")
        self.down_proj = experts.get_parameter("down_proj")
        self.backward = backward
        self.lora: AdaptersOfExperts | None = None
        self.aligned: dict[str, ExecutedWeight] = {
            proj: AlignedWeight(f"{name}.{proj}", getattr(self, proj), fmt, changes, keep_operand)
            for proj in ("gate_up_proj", "down_proj")
        }

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the routed experts.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, k] int64.
            top_k_weights: [T, k] FP32.

        Returns:
            [T, H] in hidden_states' dtype.
        """
        gate_up, down = self.aligned["gate_up_proj"], self.aligned["down_proj"]
        options = {"backward": self.backward, "adapters": None if self.lora is None else self.lora.factors()}
        return aligned_expert_mlp(hidden_states, top_k_index, top_k_weights, gate_up, down, **options)
