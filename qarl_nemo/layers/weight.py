"""A master weight with the quantized form its forward executes and its publisher sends: computed once per version."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from qarl_kernels import (
    GemmOperand,
    QuantFormat,
    QuantizedWeight,
    backward_weight,
    gemm_operand,
    quantize_weight,
    quantize_with_operand,
)

BackwardMode = Literal["dequantized", "high_precision"]


@dataclass(slots=True)
class WeightVersion:
    """The number of times the master weights changed; whoever changes them calls `bump`.

    Attributes:
        value: the version that the current master weights have.
    """

    value: int = 0

    def bump(self) -> None:
        """Declare the master weights changed, so that every cached quantized weight is stale."""
        self.value += 1


@dataclass(slots=True)
class AlignedWeight:
    """One master weight and its caches.

    Attributes:
        name: module that owns it, the prefix of its published tensors: `<name>.weight_packed`, ...
        master: [N, K] or [E, N, K] parameter, or E parameters [N, K]; BF16, or FP32 for CPU experiments.
        format: what the forward executes.
        version: shared by all weights of a model.
        keep_operand: keep what the GEMM multiplies, made in the quantizer's pass; False unpacks at each use, so that
            nothing but the packed tensors stays in memory.
    """

    name: str
    master: nn.Parameter | Sequence[nn.Parameter]
    format: QuantFormat
    version: WeightVersion
    keep_operand: bool = True
    _quantized: QuantizedWeight | None = field(default=None, init=False)
    _operand: GemmOperand | None = field(default=None, init=False)
    _cached_version: int = field(default=-1, init=False)

    @property
    def masters(self) -> list[nn.Parameter]:
        """The parameter or parameters, as a list."""
        return [self.master] if isinstance(self.master, Tensor) else list(self.master)

    @property
    def dtype(self) -> torch.dtype:
        """The masters' dtype, which GEMMs round to."""
        return self.masters[0].dtype

    def quantized(self) -> QuantizedWeight:
        """Return the stored tensors of the current version, the same objects for the forward and the publisher."""
        if self._quantized is None or self._cached_version != self.version.value:
            if self.keep_operand:
                self._quantized, self._operand = quantize_with_operand(self.master, self.format, name=self.name)
            else:
                self._quantized = quantize_weight(self.master, self.format, name=self.name)
            self._cached_version = self.version.value
        return self._quantized

    def operand(self) -> GemmOperand:
        """Return what the GEMM multiplies in the current version; FP32 compute for FP32 masters, else BF16."""
        quantized = self.quantized()
        return self._operand or gemm_operand(quantized, self.dtype, packed=True)

    def release(self) -> None:
        """Drop the caches, for example before an offload."""
        self._quantized = self._operand = None


def straight_through_weight(weight: AlignedWeight, mode: BackwardMode) -> Tensor:
    """Return W of dX = dY @ W: the weight that ran (`dequantized`) or the master (`high_precision`).

    Args:
        weight: the aligned weight.
        mode: Transformer-Engine's two words for it.

    Returns:
        [..., N, K] in the master's dtype.
    """
    if mode == "high_precision":
        master = weight.master
        return master.detach() if isinstance(master, Tensor) else torch.stack([one.detach() for one in master])
    return backward_weight(weight.operand(), weight.dtype)


def require_backward_mode(mode: str) -> None:
    """Raise unless `mode` is a legal backward mode.

    Args:
        mode: what the user asked for.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in ("dequantized", "high_precision"):
        raise ValueError(f"unknown backward mode {mode!r}; legal: dequantized, high_precision")
