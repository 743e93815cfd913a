"""How much of the served policy an update changes: the share of its codes and scales that were published otherwise.

An optimizer step that moves no code and no scale leaves the quantized policy as it was, however far it moved the
masters. Of every tensor evenly spaced rows are remembered and compared, so that memory and time do not grow with the
model, and small models are counted whole.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qarl_kernels import QuantFormat, narrow_tensor, nvfp4
from qarl_kernels.integer import unpack_int32
from qarl_nemo.names import GLOBAL_SCALE, reads_norm
from qarl_nemo.refit.publish import Layer

_SAMPLE_BYTES = 1 << 18
_SCALES = ("weight_scale", "weight_scale_inv", GLOBAL_SCALE)


class _Kind(NamedTuple):
    suffix: str
    counted_as: tuple[str, ...]
    # Codes in a row of packed words; 0 where nothing is packed.
    num_columns: int


class _Sample(NamedTuple):
    kind: _Kind
    # Elements of the whole tensor.
    size: int
    rows: Tensor


class FlippedCodes:
    """Compares every update with the one before.

    Args:
        fmt: the rollout engine's format.
    """

    def __init__(self, fmt: QuantFormat) -> None:
        self.enter(fmt)

    def enter(self, fmt: QuantFormat) -> None:
        """Go on with another grid, in a stage of a run; its first update has nothing to be compared with.

        Args:
            fmt: what the engine is sent from here on.
        """
        # Codes of two grids differ wherever a grid has moved them, which is no optimizer step's doing.
        self._format = fmt
        self._before: dict[str, _Sample] = {}
        self._last: dict[str, _Sample] = {}
        self._figures: dict[str, float] = {}
        self._step: int | None = None

    def watch_step(self, step: int, layers: Iterable[Layer]) -> Iterator[Layer]:
        """Pass an update's layers on, and remember rows of them if it is the first with this step's weights.

        Args:
            step: the step that samples with them; several updates may bring them, as a validation does.
            layers: the update's.

        Returns:
            The layers.
        """
        seen, self._step = self._step == step, step
        return iter(layers) if seen else self.watch(layers)

    def watch(self, layers: Iterable[Layer]) -> Iterator[Layer]:
        """Pass an update's layers on, and remember rows of them on the way; `figures` compares them."""
        self._before |= self._last
        self._last = {}
        for layer in layers:
            for name, tensor in layer.items():
                kind = self._kind(name, tensor, layer)
                if kind is not None:
                    self._last[name] = _Sample(
                        kind, tensor[..., 0].numel() * (kind.num_columns or tensor.shape[-1]), _sample(tensor)
                    )
            yield layer

    def figures(self) -> dict[str, float]:
        """Return what the last update changed; reads the device once.

        Returns:
            Shares of codes and of scales, each weight counted by its size: `flipped_codes`, its parts `_in` (q, k, v,
            gate and up, which read a norm's output) and `_out` (o and down), and `flipped_scales`. Nothing after the
            first update of all and of a grid, and for a format without codes.
        """
        if self._last:
            self._figures = self._compare()
            self._before |= self._last
            self._last = {}
        return self._figures

    def _compare(self) -> dict[str, float]:
        # All tensors of a kind at once: one by one, launching the kernels would take longer than running them.
        groups: dict[tuple[_Kind, torch.Size], list[tuple[_Sample, _Sample]]] = {}
        for name, sample in self._last.items():
            before = self._before.get(name)
            if before is not None and before.rows.shape == sample.rows.shape:
                groups.setdefault((sample.kind, sample.rows.shape), []).append((sample, before))
        shares = [self._shares(kind, pairs) for (kind, _), pairs in groups.items()]
        samples = [sample for pairs in groups.values() for sample, _ in pairs]
        sums: dict[str, tuple[float, int]] = {}
        for sample, share in zip(samples, torch.cat(shares).tolist() if shares else [], strict=True):
            for counted in sample.kind.counted_as:
                differing, total = sums.get(counted, (0.0, 0))
                sums[counted] = differing + share * sample.size, total + sample.size
        return {f"flipped_{kind}": differing / total for kind, (differing, total) in sums.items()}

    def _shares(self, kind: _Kind, pairs: list[tuple[_Sample, _Sample]]) -> Tensor:
        now, before = (
            self._served(kind, torch.stack([sample.rows for sample in side])) for side in zip(*pairs, strict=True)
        )
        if kind.num_columns:
            differ = self._codes(now, kind.num_columns) != self._codes(before, kind.num_columns)
        else:
            # FP8 is compared as bytes, because not every device compares its values.
            one_byte = now.element_size() == 1
            differ = now.view(torch.uint8) != before.view(torch.uint8) if one_byte else now != before
        return differ.flatten(1).mean(1, dtype=torch.float64)

    def _served(self, kind: _Kind, rows: Tensor) -> Tensor:
        # What engines serve is compared, also where finer codes are published.
        return narrow_tensor(kind.suffix, rows, self._format) if self._format.nested_bits else rows

    def _codes(self, words: Tensor, num_columns: int) -> Tensor:
        if words.dtype == torch.uint8:
            return nvfp4.unpack(words)
        return unpack_int32(words, self._format.num_bits, num_columns)

    def _kind(self, name: str, tensor: Tensor, layer: Layer) -> _Kind | None:
        owner, _, suffix = name.rpartition(".")
        is_packed = suffix == "weight_packed"
        num_columns = layer[f"{owner}.weight_scale"].shape[-1] * self._format.group_size if is_packed else 0
        if is_packed or (suffix == "weight" and tensor.element_size() == 1):
            return _Kind(suffix, ("codes", "codes_in" if reads_norm(owner) else "codes_out"), num_columns)
        return _Kind(suffix, ("scales",), 0) if suffix in _SCALES else None


def _sample(tensor: Tensor) -> Tensor:
    # A copy, because the tensor may be the learner's own. An odd step meets other rows in every expert.
    step = -(-tensor.nbytes // _SAMPLE_BYTES) | 1
    return tensor.detach().reshape(-1, tensor.shape[-1])[::step].clone()
