"""The learner's side of a refit: publishes the packed tensors that its forward executes and all other parameters."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from qarl_kernels import QuantFormat, QuantizedWeight, quantize_weight, require_finite
from qarl_nemo.names import layer_of, published_name
from qarl_nemo.refit.manifest import Manifest

Layer = dict[str, Tensor]
# Packed weights are quantized ones, and were looked at as such.
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


class PublishableWeight(Protocol):
    """What the publisher needs of an aligned weight (`qarl_nemo.layers.weight.AlignedWeight`)."""

    @property
    def name(self) -> str:
        """Module that owns the masters."""

    @property
    def master(self) -> nn.Parameter | Sequence[nn.Parameter]:
        """The master weight, or those of the experts one by one."""

    @property
    def format(self) -> QuantFormat:
        """What the engine serves."""

    def quantized(self) -> QuantizedWeight:
        """Return the stored tensors of the masters as they are now."""

    def amax(self, fmt: QuantFormat) -> Tensor | None:
        """Return the largest magnitude of all weights that share a scale of `fmt` with this one; None if none does."""


@dataclass(frozen=True, slots=True)
class RefitUpdate:
    """One update of the rollout engine.

    Attributes:
        manifest: what the update must hold.
        layers: tensors by name, each decoder layer's together, and together those outside the layers. A name is
            `<module>.<suffix>`: `...q_proj.weight_packed`, stacked `...experts.gate_up_proj.weight_packed`.
    """

    manifest: Manifest
    layers: Sequence[Layer]

    # Receivers may read the tensors until the refit is over.
    stays = True
    rehearsed = False

    @classmethod
    def of(cls, layers: Iterable[Layer], fmt: QuantFormat, *, version: int) -> Self:
        """Make an update of layers.

        Args:
            layers: tensors by name; a layer may be emptied when the next is asked for.
            fmt: the rollout engine's format.
            version: the number by which engines know these weights.
        """
        held = [dict(layer) for layer in layers]
        return cls(_manifest(held, fmt, version), held)

    def served_as(self, fmt: QuantFormat) -> Self:
        """Return the same update for engines of another format that is nested in what was published.

        Args:
            fmt: what these engines serve, with the published format as its `nested_in`, or the published one itself.

        Returns:
            An update of the same tensors, under the same version.

        Raises:
            ValueError: its engines cannot make their codes of these.
        """
        published = self.manifest.published or self.manifest.format
        if fmt.published_name != published:
            raise ValueError(
                f"what is published is {published}; {fmt.name} is not nested in it: publish with nested_in, and "
                "name it here, too"
            )
        nested, grid_bits = _nesting(fmt)
        return replace(self, manifest=replace(self.manifest, format=fmt.name, published=nested, grid_bits=grid_bits))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: tensor for layer in self.layers for name, tensor in layer.items()}

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    def layer_by_layer(self) -> Iterator[Layer]:
        """Return one layer after another."""
        return iter(self.layers)

    def contradictions(self) -> list[str]:
        """Say how the tensors differ from the manifest in name, shape and dtype."""
        tensors = self.tensors
        wrong = (self.manifest.problem(name, tensor) for name, tensor in tensors.items())
        return self.manifest.missing(tensors) + [text for text in wrong if text]


class StreamedUpdate:
    """One update of the rollout engine that is never whole in memory: each layer is made, sent and dropped.

    The layers are made twice, once for the manifest's checksums and once to be sent; three times if they are rehearsed.
    If several ranks make them together, every rank enters the update (`with`) and one pushes it. Leaving it makes the
    layers that were not requested, even if the push failed, so that no rank waits for another; only after a layer that
    could not be made (`broken`) nothing can help the others.

    Args:
        stream: yields the tensors of one layer after another, by name; it may empty a layer when the next one is
            requested.
        fmt: the rollout engine's format.
        version: the number by which engines know these weights.
        rehearsed: send everything twice, first to be verified and then to be served, so that receivers hold one layer
            at a time, too. Otherwise they hold their whole part until it is verified.
        lend: wraps layers on their way to the sender, such as `ColocatedSender.lend`.
        watch: wraps them once, on their way to the manifest, such as `FlippedCodes.watch`.
    """

    stays = False

    def __init__(
        self,
        stream: Callable[[], Iterable[Layer]],
        fmt: QuantFormat,
        *,
        version: int,
        rehearsed: bool = False,
        lend: Callable[[Iterable[Layer]], Iterator[Layer]] = iter,
        watch: Callable[[Iterable[Layer]], Iterator[Layer]] = iter,
    ) -> None:
        self.manifest = _manifest(watch(stream()), fmt, version)
        self.rehearsed = rehearsed
        self.broken = False
        self._passes = [self._noticed(lend(stream())) for _ in range(2 if rehearsed else 1)]
        self._num_begun = 0

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.manifest.num_bytes

    def layer_by_layer(self) -> Iterator[Layer]:
        """Return one layer after another; a receiver that keeps tensors must copy before it asks for the next.

        Each call is the next pass: there is one, or two for a rehearsed update.
        """
        # A generator function here would, when abandoned half-way, close the one that `__exit__` has to finish.
        self._num_begun += 1
        return self._passes[self._num_begun - 1]

    def _noticed(self, layers: Iterable[Layer]) -> Iterator[Layer]:
        try:
            yield from layers
        except Exception:
            self.broken = True
            raise

    def contradictions(self) -> list[str]:
        """Return nothing: layers are made in the same way as for the manifest, and checksums find any difference."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.broken:
            # The others wait in the middle of a pass that this rank cannot finish, and would misread another.
            return
        for layers in self._passes:
            for _ in layers:
                pass


Update = RefitUpdate | StreamedUpdate


def _nesting(fmt: QuantFormat) -> tuple[str | None, int]:
    return (fmt.published_name, fmt.grid_bits) if fmt.nested_bits else (None, 0)


def _manifest(layers: Iterable[Layer], fmt: QuantFormat, version: int) -> Manifest:
    published, grid_bits = _nesting(fmt)
    return Manifest.of(layers, version=version, fmt=fmt.name, published=published, grid_bits=grid_bits)


def publish(
    weights: Mapping[str, PublishableWeight],
    parameters: Iterable[tuple[str, Tensor]],
    fmt: QuantFormat,
    *,
    version: int,
) -> RefitUpdate:
    """Collect what the rollout engine will serve as `version`.

    Args:
        weights: see `publish_layers`.
        parameters: all parameters of the model by name.
        fmt: the rollout engine's format.
        version: the number by which engines will know these weights.

    Returns:
        The update; its tensors are the learner's own, so a receiver that keeps them must copy.

    Raises:
        ValueError: see `publish_layers`.
    """
    return RefitUpdate.of(publish_layers(weights, parameters, fmt), fmt, version=version)


def publish_layers(
    weights: Mapping[str, PublishableWeight], parameters: Iterable[tuple[str, Tensor]], fmt: QuantFormat
) -> list[Layer]:
    """Collect what the rollout engine will serve, layer by layer.

    Args:
        weights: aligned weights by parameter name. If the learner executes `fmt`, the tensors of its own forward are
            published; if not (`rollout_only`), the masters are quantized here, by the same quantizer.
        parameters: all parameters of the model by name; those not in `weights` are published as they are.
        fmt: the rollout engine's format.

    Returns:
        Tensors by name, each decoder layer's together; they are the learner's own.

    Raises:
        ValueError: a weight holds NaN or Inf; on a GPU every such weight is named.
    """
    parameters = list(parameters)
    quantized = {weight.name: packed(weight, fmt) for weight in weights.values()}
    require_servable(quantized, {name: tensor for name, tensor in parameters if name not in weights})
    layers: dict[str, Layer] = {}
    for name, whole in quantized.items():
        layer = layers.setdefault(layer_of(name), {})
        layer |= {f"{name}.{suffix}": part for suffix, part in whole.tensors.items()}
    for name, parameter in parameters:
        if name not in weights:
            layers.setdefault(layer_of(name), {})[published_name(name)] = parameter.detach()
    return list(layers.values())


def require_servable(quantized: Mapping[str, QuantizedWeight], plain: Mapping[str, Tensor]) -> None:
    """Raise if what an engine would be sent holds NaN or Inf.

    Args:
        quantized: aligned weights by name.
        plain: weights that are served as they are.

    Raises:
        ValueError: names every such weight.
    """
    problems = []
    try:
        require_finite(quantized)
    except ValueError as error:
        problems.append(str(error))
    # A maximum needs no memory beside the weights, and NaN is the largest of all.
    looked_at = {name: weight for name, weight in plain.items() if weight.dtype in _PLAIN and weight.numel()}
    largest = {name: vector_norm(weight, math.inf) for name, weight in looked_at.items()}
    finite = torch.stack(list(largest.values())).isfinite().tolist() if largest else []
    bad = [name for name, good in zip(largest, finite, strict=True) if not good]
    if bad:
        problems.append(f"NaN or Inf in {len(bad)} weight(s) that are served as they are: {', '.join(bad)}")
    if problems:
        raise ValueError("\n  ".join(problems))


def packed(weight: PublishableWeight, fmt: QuantFormat) -> QuantizedWeight:
    """Return the tensors of a learner's own forward if it executes `fmt`, else its master quantized to `fmt`."""
    if weight.format == fmt:
        return weight.quantized()
    return quantize_weight(weight.master, fmt, name=weight.name, amax=weight.amax(fmt))
