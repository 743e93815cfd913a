"""A dense linear layer that executes its quantized weight."""

from torch import Tensor, nn

from qarl_kernels import QuantFormat, one_group
from qarl_nemo.layers.autograd import aligned_grouped_gemm
from qarl_nemo.layers.lora import Adapter
from qarl_nemo.layers.weight import AlignedWeight, ExecutedWeight, MasterChanges, require_backward
from qarl_nemo.names import Backward


class AlignedLinear(nn.Module):
    """y = gemm(quantize(x), quantize(W), b); takes over the parameters of the linear layer it replaces.

    Args:
        linear: the layer to replace.
        fmt: the format to execute.
        changes: counts the changes of the model's masters.
        name: the layer's name in the model.
        backward: which weight the input gradient uses.
        keep_operand: see `AlignedWeight`.

    Raises:
        ValueError: unknown backward mode.
    """

    def __init__(
        self,
        linear: nn.Linear,
        fmt: QuantFormat,
        changes: MasterChanges,
        *,
        name: str = "linear",
        backward: Backward = "dequantized",
        keep_operand: bool = True,
    ) -> None:
        super().__init__()
        require_backward(backward)
        self.weight = linear.get_parameter("weight")
        self.bias = linear.bias
        self.backward = backward
        self.lora: Adapter | None = None
        self.aligned: dict[str, ExecutedWeight] = {
            "weight": AlignedWeight(name, self.weight, fmt, changes, keep_operand)
        }

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: [..., K].

        Returns:
            [..., N] in x's dtype.
        """
        rows = x.reshape(-1, x.shape[-1])
        weight = self.aligned["weight"]
        out = aligned_grouped_gemm(rows, weight, one_group(rows), backward=self.backward, bias=self.bias)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if self.lora is None else out + self.lora(x)
