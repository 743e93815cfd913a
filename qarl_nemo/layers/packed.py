"""Weights without a master: what a refit brought to the rollout engine, or a frozen base that learner and engine share.

A frozen weight is executed as an aligned one is: `AlignedLinear` and `AlignedExperts` hold either, and the built-in
sampler serves the learner's own object, so that the base is in memory once.
"""

import torch
from torch import Tensor, nn

from qarl_kernels import (
    GemmOperand,
    QuantFormat,
    QuantizedWeight,
    expert_mlp,
    gemm_operand,
    grouped_gemm,
    one_group,
)
from qarl_nemo.layers.lora import Adapter, AdaptersOfExperts
from qarl_nemo.layers.weight import MasterChanges


class PackedWeight:
    """A slot for one published or frozen weight.

    Args:
        fmt: the format the slot takes.
        shape: logical shape [..., N, K].
        dtype: activation dtype.
        keep_operand: keep what the GEMM multiplies, repacked once at refit as engines do; False repacks at each use,
            so that nothing but the packed tensors stays in memory.
        name: module that owns the weight.
    """

    master = None

    def __init__(
        self, fmt: QuantFormat, shape: tuple[int, ...], dtype: torch.dtype, *, keep_operand: bool, name: str = "weight"
    ) -> None:
        self.name = name
        self.format = fmt
        self.changes = MasterChanges()
        self.shape = shape
        self.dtype = dtype
        self.keep_operand = keep_operand
        self.weight: QuantizedWeight | None = None
        self._operand: GemmOperand | None = None

    def prepare(self, weight: QuantizedWeight) -> GemmOperand | None:
        """Return the operand that `fill` will keep beside the weight; until then the slot serves the old weight."""
        return gemm_operand(weight, self.dtype) if self.keep_operand else None

    def fill(self, weight: QuantizedWeight, operand: GemmOperand | None) -> None:
        """Serve this weight, with the operand that `prepare` returned, from now on; nothing here can fail."""
        self.weight, self._operand = weight, operand

    def operand(self) -> GemmOperand:
        """Return what the GEMM multiplies."""
        assert self.weight is not None, "no refit has reached this layer"
        return self._operand or gemm_operand(self.weight, self.dtype, packed=True)


class PackedLinear(nn.Module):
    """A dense linear layer served from packed tensors.

    Args:
        slot: where refits put the weight [N, K].
        bias: the bias parameter of the layer it replaces, or None.
    """

    def __init__(self, slot: PackedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.slots = {"weight": slot}
        self.bias = bias
        self.lora: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: x [..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        out = grouped_gemm(rows, self.slots["weight"].operand().stacked(), one_group(rows), bias=self.bias)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if self.lora is None else out + self.lora(x)


class PackedExperts(nn.Module):
    """Routed experts served from packed tensors.

    Args:
        gate_up: slot for [E, 2 I, H].
        down: slot for [E, H, I].
    """

    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        self.slots = {"gate_up_proj": gate_up, "down_proj": down}
        self.lora: AdaptersOfExperts | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the routed experts: hidden_states [T, H] -> [T, H]."""
        fc1, fc2 = self.slots["gate_up_proj"].operand(), self.slots["down_proj"].operand()
        adapters = None if self.lora is None else self.lora.factors()
        return expert_mlp(hidden_states, top_k_index, top_k_weights, fc1, fc2, adapters)
