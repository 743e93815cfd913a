"""The learner's side of a refit: the packed tensors its forward executes, and every other parameter as it is."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

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

    # Receivers may read the tensors until the refit is over.
    stays = True
    rehearsed = False

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield everything at once."""
        yield self.tensors

    def contradictions(self) -> list[str]:
        """Say how the tensors differ from the manifest in name, shape and dtype."""
        records, tensors = self.manifest.records, self.tensors
        found = [f"missing: {name}" for name in records if name not in tensors]
        found += [f"not in the manifest: {name}" for name in tensors if name not in records]
        differences = (records[name].difference(name, tensor) for name, tensor in tensors.items() if name in records)
        return found + [text for text in differences if text]


class StreamedUpdate:
    """One update of the rollout engine that is never whole in memory: a layer is made, sent and forgotten.

    The layers are made twice, once for the manifest's checksums and once to be sent; three times if they are rehearsed.
    Where several ranks make them together, every rank enters the update (`with`) and one pushes it; leaving it makes
    the layers that nobody asked for, also when the push failed, so that no rank waits for another.

    Args:
        stream: starts to make the tensors of one layer after another, by name; it may empty a layer when it is asked
            for the next.
        fmt: the rollout engine's format.
        version: the weight version.
        rehearsed: send everything twice, first to be verified and then to be served, so that the receivers, too, hold
            one layer at a time. Else they hold their part until it is verified.
        lend: as `stream`, for the layers that are sent; by default `stream` makes them, too.
    """

    stays = False

    def __init__(
        self,
        stream: Callable[[], Iterable[dict[str, Tensor]]],
        fmt: QuantFormat,
        *,
        version: int,
        rehearsed: bool = False,
        lend: Callable[[], Iterable[dict[str, Tensor]]] | None = None,
    ) -> None:
        named = (item for layer in stream() for item in layer.items())
        self.manifest = Manifest.of(named, version=version, fmt=fmt.name)
        self.rehearsed = rehearsed
        self._passes = [iter((lend or stream)()) for _ in range(2 if rehearsed else 1)]
        self._num_begun = 0

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.manifest.num_bytes

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Return one layer after another; a receiver that keeps tensors must copy before it asks for the next.

        Each call is the next pass: one, or two of a rehearsed update.
        """
        # Not a generator of its own: abandoned half-way, it would close the one that `__exit__` goes on with.
        self._num_begun += 1
        return self._passes[self._num_begun - 1]

    def contradictions(self) -> list[str]:
        """Return nothing: what is sent is made as the manifest was, and checksums tell if it is not the same."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for layers in self._passes:
            for _ in layers:
                pass


Update = RefitUpdate | StreamedUpdate


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
    quantized = {weight.name: packed(weight, fmt) for weight in weights.values()}
    require_finite(quantized)
    tensors = {f"{name}.{suffix}": part for name, whole in quantized.items() for suffix, part in whole.tensors.items()}
    tensors.update({name: tensor.detach() for name, tensor in parameters if name not in weights})
    return RefitUpdate(Manifest.of(tensors, version=version, fmt=fmt.name), tensors)


def packed(weight: PublishableWeight, fmt: QuantFormat) -> QuantizedWeight:
    """Return the tensors of a learner's own forward where it executes `fmt`, else its master in `fmt`."""
    return weight.quantized() if weight.format == fmt else quantize_weight(weight.master, fmt, name=weight.name)
