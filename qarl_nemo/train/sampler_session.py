"""The built-in sampler's part in refits: a new version is made beside the one that serves, and then takes its place."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qarl_kernels import QuantFormat, QuantizedWeight, stored_layout
from qarl_nemo.layers.frozen import FrozenBase
from qarl_nemo.layers.packed import PackedWeight
from qarl_nemo.names import published_name
from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.manifest import Layout, Manifest
from qarl_nemo.refit.session import Parts, RankSession


class SamplerSession(RankSession):
    """Refits of a model with packed layers, in this process.

    Args:
        model: the sampler's.
        slots: its packed weights by module name.
        fmt: what they hold.
        device: where everything lives.
        frozen: what no refit brings.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Mapping[str, PackedWeight],
        fmt: QuantFormat,
        device: torch.device,
        frozen: FrozenBase,
    ) -> None:
        super().__init__(Arrivals(0, device))
        parameters = model.named_parameters()
        self._parameters = {published_name(name): one for name, one in parameters if name not in frozen.parameters}
        self._slots = {name: slot for name, slot in slots.items() if name not in frozen.weights}
        self._format = fmt

    def refusals(self, manifest: Manifest, *, rehearsed: bool) -> list[str]:
        """Return what speaks against an update: its layout, its format, or that it comes twice."""
        problems = manifest.layout_problems(self.layout())
        if manifest.format != self._format.name:
            problems.append(f"the update is in format {manifest.format}, this engine serves {self._format.name}")
        if rehearsed:
            problems.append("this engine makes a version as a whole; send an update that is not rehearsed")
        return problems

    def layout(self) -> Layout:
        """Return shape and dtype of every tensor that an update holds, by its published name."""
        stored = {
            f"{name}.{suffix}": layout
            for name, slot in self._slots.items()
            for suffix, layout in stored_layout(slot.shape, self._format).items()
        }
        return stored | {name: (tuple(one.shape), one.dtype) for name, one in self._parameters.items()}

    def layer_of(self, name: str) -> str:
        """Return the packed weight that a tensor is a part of; a parameter is installed by itself."""
        return name if name in self._parameters else name.rpartition(".")[0]

    def part(self, name: str, whole: Tensor) -> Tensor:  # noqa: ARG002 one rank keeps all
        """Return a copy: the learner goes on changing its own tensors."""
        return whole.to(self.arrivals.device, copy=True, memory_format=torch.contiguous_format)

    def stop_serving(self) -> None:
        """Serve on: whatever fails before the new version is whole, the old one is."""

    def install(self, layers: dict[str, Parts]) -> None:
        """Make all packed weights and what their GEMMs multiply, and only then change places, which cannot fail."""
        weights = {
            name: QuantizedWeight(self._format, slot.shape, _by_suffix(layers[name]))
            for name, slot in self._slots.items()
        }
        operands = {name: slot.prepare(weights[name]) for name, slot in self._slots.items()}
        for name, parameter in self._parameters.items():
            parameter.data = layers[name][name]
        for name, slot in self._slots.items():
            slot.fill(weights[name], operands[name])


def _by_suffix(parts: Parts) -> dict[str, Tensor]:
    return {name.rpartition(".")[2]: tensor for name, tensor in parts.items()}
