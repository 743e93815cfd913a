"""What all aligned layers of one Megatron model share: format, weight of the input gradient, count of changes."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from qarl_kernels import QuantFormat
from qarl_nemo.layers.weight import AlignedWeight, MasterChanges, require_backward
from qarl_nemo.names import Backward, check_targets

Backend = Literal["kernels", "transformer_engine"]


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a Megatron model is aligned with its rollout engine.

    Attributes:
        format: what aligned layers execute and publish.
        targets: what is quantized.
        backward: which weight the input gradient uses.
        keep_operand: keep what the GEMMs multiply between uses; False keeps only the packed tensors.
        changes: counts the changes of the masters; every optimizer step is one.
        backend: what multiplies in the experts: this package's kernels or, for `fp8_block` only, Transformer-Engine's
            own FP8 block recipe.
        engine_rounding: normalize and rotate with the engine's rounding points; False leaves both to Megatron.
    """

    format: QuantFormat
    targets: tuple[str, ...] = ("experts",)
    backward: Backward = "dequantized"
    keep_operand: bool = False
    changes: MasterChanges = field(default_factory=MasterChanges)
    backend: Backend = "kernels"
    engine_rounding: bool = False

    def __post_init__(self) -> None:
        require_backward(self.backward)
        check_targets(self.targets)
        if self.backend not in get_args(Backend):
            raise ValueError(f"unknown backend {self.backend!r}; legal: {', '.join(get_args(Backend))}")
        if self.backend != "kernels" and self.format.weight_kind != "fp8_blocks":
            raise ValueError(
                f"backend={self.backend!r} has no {self.format.name}: it runs fp8_block; set backend='kernels'"
            )

    def __deepcopy__(self, memo: dict) -> "Alignment":
        # Megatron copies specs; layers built from the copies must still share one count.
        return self

    def weight(self, name: str, master: nn.Parameter | list[nn.Parameter]) -> AlignedWeight:
        """Return the aligned form of a master weight of this model."""
        return AlignedWeight(name, master, self.format, self.changes, self.keep_operand)


def bump_on_step(optimizer: Any, changes: MasterChanges, model: Sequence[nn.Module] = ()) -> None:
    """Make every step of an optimizer, Megatron's or torch's, declare that the master weights have changed.

    Args:
        optimizer: changed in place.
        changes: counts the steps.
        model: chunks whose quantized weights are dropped before a step, which makes them stale, so that they take no
            room beside the FP32 copies that Megatron's step makes of all gradients.
    """
    step = optimizer.step

    @functools.wraps(step)
    def step_and_bump(*args: Any, **kwargs: Any) -> Any:
        release(model)
        # A step that fails half-way may have changed weights.
        try:
            return step(*args, **kwargs)
        finally:
            changes.bump()

    optimizer.step = step_and_bump


def aligned_weights(model: Iterable[nn.Module]) -> list[AlignedWeight]:
    """Return every aligned weight of this rank, in the order of the model's chunks."""
    modules = (module for chunk in model for module in chunk.modules())
    return [module.aligned for module in modules if isinstance(getattr(module, "aligned", None), AlignedWeight)]


def release(model: Iterable[nn.Module]) -> None:
    """Drop every quantized weight, for example before the parameters are offloaded."""
    for weight in aligned_weights(model):
        weight.release()
