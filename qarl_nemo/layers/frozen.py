"""A frozen base: weights that are executed and served in one format for the whole run, without masters or gradients.

What is frozen is in memory once: the learner's `PackedWeight` is also the built-in sampler's, and refits leave it out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from qarl_kernels import QuantizedWeight, require_finite
from qarl_nemo.layers.experts import AlignedExperts
from qarl_nemo.layers.install import InstallReport
from qarl_nemo.layers.linear import AlignedLinear
from qarl_nemo.layers.norm_noise import takes_noise
from qarl_nemo.layers.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """What a model's training does not change.

    Attributes:
        weights: packed weights by the name of the module that owns them.
        parameters: all other parameters that have no gradient, by name, without the norms that an engine may serve with
            noise.
    """

    weights: Mapping[str, PackedWeight] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "FrozenBase":
        """Collect what is frozen in a model with aligned layers."""
        executed = (weight for module in model.modules() for weight in getattr(module, "aligned", {}).values())
        weights = {weight.name: weight for weight in executed if isinstance(weight, PackedWeight)}
        frozen = (item for item in model.named_parameters() if not item[1].requires_grad)
        parameters = {name: one.data for name, one in frozen if not takes_noise(name)}
        return cls(weights, parameters)

    def __bool__(self) -> bool:
        return bool(self.weights or self.parameters)

    def refitted(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the parameter of all that refits bring: whatever is not frozen."""
        return (item for item in model.named_parameters() if item[0] not in self.parameters)


def freeze(model: nn.Module, report: InstallReport) -> None:
    """Quantize every aligned weight for good and drop its master.

    Args:
        model: changed in place.
        report: what `install` returned for it; changed likewise.

    Raises:
        ValueError: a weight holds NaN or Inf.
    """
    frozen = {}
    for key, weight in list(report.weights.items()):
        frozen[weight.name] = weight.quantized()
        hold(take_master(model, report, key), frozen[weight.name])
    require_finite(frozen)


def take_master(model: nn.Module, report: InstallReport, key: str) -> PackedWeight:
    """Put an empty packed weight in the place of an aligned one and its master.

    Args:
        model: changed in place.
        report: what `install` returned for it; changed likewise.
        key: the master's parameter name.

    Returns:
        The weight, for `hold`.
    """
    weight = report.weights.pop(key)
    owner, _, parameter = key.rpartition(".")
    slot = PackedWeight(weight.format, weight.shape, weight.dtype, keep_operand=weight.keep_operand, name=weight.name)
    module = model.get_submodule(owner)
    assert isinstance(module, AlignedLinear | AlignedExperts)
    module.register_parameter(parameter, None)
    module.aligned[parameter] = slot
    return slot


def hold(slot: PackedWeight, quantized: QuantizedWeight) -> None:
    """Execute and serve these tensors from now on.

    Args:
        slot: what `take_master` returned.
        quantized: the stored tensors, which must not change any more.
    """
    slot.fill(quantized, slot.prepare(quantized))
