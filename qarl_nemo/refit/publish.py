"""The learner's side of a refit: the packed tensors its forward executes, and every other parameter as it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from qarl_kernels import QuantFormat, QuantizedWeight, quantize_weight, require_finite
from qarl_nemo.refit.manifest import Manifest


class PublishableWeight(Protocol):
    """What the publisher needs of an aligned weight (`qarl_nemo.layers.weight.AlignedWeight`)."""

    name: str
    master: nn.Parameter
    format: QuantFormat

    def quantized(self) -> QuantizedWeight:
        """Return the stored tensors of the current version."""


@dataclass(frozen=True, slots=True)
class RefitUpdate:
    """One update of the rollout engine.

    Attributes:
        manifest: what the update must hold.
        tensors: `<module>.<suffix>` for quantized weights (`...q_proj.weight_packed`, stacked
            `...experts.gate_up_proj.weight_packed`), parameter names for the others.
    """

    manifest: Manifest
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def publish(
    weights: Mapping[str, PublishableWeight],
    parameters: Iterable[tuple[str, Tensor]],
    fmt: QuantFormat,
    *,
    version: int,
) -> RefitUpdate:
    """Collect what the rollout engine will serve as `version`.

    Args:
        weights: aligned weights by parameter name. Where the learner executes `fmt`, the tensors of its own forward
            are published; where it does not (`rollout_only`), the masters are quantized here, by the same quantizer.
        parameters: all parameters of the model by name; those not in `weights` are published as they are.
        fmt: the rollout engine's format.
        version: the weight version.

    Returns:
        The update; its tensors are the learner's own, so a receiver that keeps them must copy.

    Raises:
        ValueError: a weight holds NaN or Inf; on a GPU every such weight is named.
    """
    quantized = {weight.name: _quantized(weight, fmt) for weight in weights.values()}
    require_finite(quantized)
    tensors = {f"{name}.{suffix}": part for name, whole in quantized.items() for suffix, part in whole.tensors.items()}
    tensors.update({name: tensor.detach() for name, tensor in parameters if name not in weights})
    return RefitUpdate(Manifest.of(tensors, version=version, fmt=fmt.name), tensors)


def _quantized(weight: PublishableWeight, fmt: QuantFormat) -> QuantizedWeight:
    return weight.quantized() if weight.format == fmt else quantize_weight(weight.master, fmt, name=weight.name)
