"""The aligned weight: one master weight, and the one quantized form of it that the learner runs and the engine gets.

The problem. A rollout engine with quantized weights samples from the policy pi(W_q). A learner that evaluates pi(W)
with its BF16 masters trains another policy than the one that sampled: exp(prev - generation) then measures rounding
instead of staleness, on every token, and the product over a long response drifts far from 1. QaRL closes the gap where
it opens: the learner's forward executes the quantized weight that the engine serves.

What is computed, for a master weight W of shape [N, K] or [E, N, K]:

    stored     (q, s) = quantize(bf16(W))              packed codes and scales; s has its stored dtype before q is made
    operand    W_q    = what the GEMM multiplies       made from (q, s), in the quantizer's own pass where a kernel can
    forward    y      = gemm(quantize(x), W_q)         activations are quantized where the format says so
    backward   dX     = dY @ W_q, or dY @ W            `dequantized` (default): the exact gradient of what ran
               dW     = dY^T @ x                       onto W, as if quantization were the identity (straight-through)
    published  (q, s)                                  the same tensor objects, not a second computation

`AlignedWeight` holds W and caches (q, s) and W_q. `autograd.py` and `expert_autograd.py` multiply by `operand()` and
return its gradient; `refit/` sends `quantized()`.

Why not the obvious alternatives:

- Fake quantization (round W to the grid and back, then call the usual BF16 GEMM) has the right weights and the wrong
  arithmetic. FP8 engines round the activations as well, w4a8 multiplies an FP8 copy of its int4 weights, and formats
  differ in where they apply their scales. The formats' own GEMMs round where the engine rounds.
- Quantizing again at publication would give the same bits only as long as two code paths stay equal: the same rounding
  of FP32 masters to BF16, the same kernel, the same moment between two optimizer steps. With one cached result
  dequantize(published) == weight of the forward holds by construction, and tests compare it bit for bit.
- Quantizing in every forward is correct but wasteful: between two changes of W there are the prev-logprobs, every
  micro-batch, every recomputed activation and the refit, and all of them need the same tensors.
- Detecting a change of W by itself does not work. Optimizers write masters through other views of their storage
  (Megatron's flat parameter buffers, `.data`), which torch's own version counter does not see; a checksum would read
  every weight in every forward. So whoever changes masters says so: `MasterChanges.bump`.

What to know before changing this file:

- A forgotten `bump` is silent. Learner and engine then agree, on yesterday's weights, so no mismatch metric shows it.
  Optimizer steps bump (`train/learner.py`, `megatron/alignment.py`, also when a step fails half-way) and so do the
  load hooks of the Megatron layers. New code that writes a parameter must bump, too.
- One `MasterChanges` is shared by all weights of a model: a step changes all of them, and one counter cannot leave a
  layer behind. A bump between a forward and its backward would make dX use another weight than y; the backward asserts
  that it did not happen.
- Nothing here looks at `module.training` or at grad mode: prev_logprobs (no grad) and the training forward must be the
  same arithmetic.
- `master` may be E separate parameters, as Megatron's grouped linear holds them. The quantizer reads them where they
  lie and gives the bits that their stack would give; stacking first would copy every expert.
- Beside the stored tensors the operand takes, on a GPU, nothing for FP8 and INT8, 1 byte a weight for w4a8 and 2 bytes
  for w4a16, w8a16 and nvfp4. `keep_operand=False` saves them and unpacks at each use, inside the GEMM where that is
  faster.
- `quantized()` never waits for the GPU. It counts NaN and Inf on the device, and `require_finite` reads all counts at
  once when the weights are published.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, get_args

import torch
from torch import Tensor, nn

from qarl_kernels import (
    GemmOperand,
    QuantFormat,
    QuantizedWeight,
    backward_weight,
    gemm_operand,
    largest,
    quantize_weight,
    quantize_with_operand,
)
from qarl_nemo.names import Backward


@dataclass(slots=True)
class MasterChanges:
    """The number of times the master weights changed; whoever changes them calls `bump`.

    Attributes:
        count: how often they changed so far.
    """

    count: int = 0

    def bump(self) -> None:
        """Declare the master weights changed, so that every cached quantized weight is stale."""
        self.count += 1


class ExecutedWeight(Protocol):
    """What a layer needs of its weight: an aligned one, or a frozen one (`qarl_nemo.layers.packed.PackedWeight`).

    Attributes:
        name: module that owns it.
        format: what the forward executes.
        changes: counts the changes of the master.
    """

    name: str
    format: QuantFormat
    changes: MasterChanges

    @property
    def master(self) -> nn.Parameter | Sequence[nn.Parameter] | None:
        """What is trained; None where the weight is frozen."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] or [E, N, K]."""

    @property
    def dtype(self) -> torch.dtype:
        """What GEMMs round to."""

    def operand(self) -> GemmOperand:
        """Return what the GEMM multiplies now."""


@dataclass(slots=True)
class AlignedWeight:
    """One master weight and its caches.

    Attributes:
        name: module that owns it, the prefix of its published tensors: `<name>.weight_packed`, ...
        master: [N, K] or [E, N, K] parameter, or E parameters [N, K]; BF16, or FP32 for CPU experiments.
        format: what the forward executes.
        changes: counts the changes of the masters; shared by all weights of a model.
        keep_operand: keep what the GEMM multiplies, made in the quantizer's pass; False unpacks at each use, so that
            nothing but the packed tensors stays in memory.
        fused: masters of the weights that engines fuse with this one; they share the scale of a `tensor_scaled` format.
    """

    name: str
    master: nn.Parameter | Sequence[nn.Parameter]
    format: QuantFormat
    changes: MasterChanges
    keep_operand: bool = True
    fused: Sequence[nn.Parameter] = ()
    _quantized: QuantizedWeight | None = field(default=None, init=False)
    _operand: GemmOperand | None = field(default=None, init=False)
    _cached_at: int = field(default=-1, init=False)

    @property
    def masters(self) -> list[nn.Parameter]:
        """The parameter or parameters, as a list."""
        return [self.master] if isinstance(self.master, Tensor) else list(self.master)

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] or [E, N, K]."""
        masters = self.masters
        return tuple(masters[0].shape) if isinstance(self.master, Tensor) else (len(masters), *masters[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The masters' dtype, which GEMMs round to."""
        return self.masters[0].dtype

    def quantized(self) -> QuantizedWeight:
        """Return the masters' stored tensors as of now, the same objects for the forward and the publisher."""
        if self._quantized is None or self._cached_at != self.changes.count:
            options = {"name": self.name, "amax": self.amax(self.format)}
            if self.keep_operand:
                self._quantized, self._operand = quantize_with_operand(self.master, self.format, **options)
            else:
                self._quantized = quantize_weight(self.master, self.format, **options)
            self._cached_at = self.changes.count
        return self._quantized

    def amax(self, fmt: QuantFormat) -> Tensor | None:
        """Return the largest magnitude of all weights that share a scale of `fmt` with this one; None if none does."""
        if not (fmt.tensor_scaled and self.fused):
            return None
        return torch.stack([largest(one) for one in (self.master, *self.fused)]).amax(0)

    def operand(self) -> GemmOperand:
        """Return what the GEMM multiplies now; FP32 compute for FP32 masters, else BF16."""
        quantized = self.quantized()
        return self._operand or gemm_operand(quantized, self.dtype, packed=True)

    def execute(self, fmt: QuantFormat) -> None:
        """Execute and publish another format from now on."""
        self.format = fmt
        self.release()

    def release(self) -> None:
        """Drop the caches, for example before an offload."""
        self._quantized = self._operand = None


def straight_through_weight(weight: ExecutedWeight, backward: Backward) -> Tensor:
    """Return W of dX = dY @ W: the weight that ran (`dequantized`) or the master (`high_precision`).

    Args:
        weight: the aligned weight; of a frozen one nothing but what ran is known.
        backward: Transformer-Engine's two words for it.

    Returns:
        [..., N, K] in the master's dtype.
    """
    master = weight.master
    if backward == "high_precision" and master is not None:
        return master.detach() if isinstance(master, Tensor) else torch.stack([one.detach() for one in master])
    return backward_weight(weight.operand(), weight.dtype)


def require_backward(backward: str) -> None:
    """Raise unless `backward` is a legal choice of the input gradient's weight.

    Raises:
        ValueError: it is not.
    """
    if backward not in get_args(Backward):
        raise ValueError(f"unknown backward mode {backward!r}; legal: {', '.join(get_args(Backward))}")
