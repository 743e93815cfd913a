"""How much of the served policy an update changes: the share of its codes and scales that were published otherwise.

An optimizer step that moves no code and no scale leaves the quantized policy as it was, however far it moved the
masters. Of every tensor evenly spaced rows are remembered and compared, so that memory and time do not grow with the
model, and small models are counted whole.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from qarl_kernels import QuantFormat, narrow_tensor, nvfp4
from qarl_kernels.integer import unpack_int32
from qarl_nemo.names import reads_norm
from qarl_nemo.refit.publish import Layer

_SAMPLE_BYTES = 1 << 18
_SCALES = ("weight_scale", "weight_scale_inv")


class FlippedCodes:
    """Compares every update with the one before.

    Args:
        fmt: the rollout engine's format.
    """

    def __init__(self, fmt: QuantFormat) -> None:
        self._format = fmt
        self._rows: dict[str, Tensor] = {}
        self._changed: list[tuple[tuple[str, ...], int, Tensor]] = []

    def enter(self, fmt: QuantFormat) -> None:
        """Go on with another grid, in a stage of a run; its first update has nothing to be compared with.

        Args:
            fmt: what the engine is sent from here on.
        """
        # Codes of two grids differ wherever a grid has moved them, which is no optimizer step's doing.
        self._format, self._rows, self._changed = fmt, {}, []

    def watch(self, layers: Iterable[Layer]) -> Iterator[Layer]:
        """Pass an update's layers on, and compare them on the way."""
        self._changed = []
        for layer in layers:
            for name, tensor in layer.items():
                self._compare(name, tensor, layer)
            yield layer

    def figures(self) -> dict[str, float]:
        """Return what the last update changed; reads the device once.

        Returns:
            Shares of codes and of scales, each weight counted by its size: `flipped_codes`, its parts `_in` (q, k, v,
            gate and up, which read a norm's output) and `_out` (o and down), and `flipped_scales`. Nothing after the
            first update of all and of a grid, and for a format without codes.
        """
        shares = torch.stack([share for *_, share in self._changed]).tolist() if self._changed else []
        sums: dict[str, tuple[float, int]] = {}
        for (kinds, size, _), share in zip(self._changed, shares, strict=True):
            for kind in kinds:
                differing, total = sums.get(kind, (0.0, 0))
                sums[kind] = differing + share * size, total + size
        return {f"flipped_{kind}": differing / total for kind, (differing, total) in sums.items()}

    def _compare(self, name: str, tensor: Tensor, layer: Layer) -> None:
        owner, _, suffix = name.rpartition(".")
        is_codes = suffix == "weight_packed" or (suffix == "weight" and tensor.element_size() == 1)
        if not is_codes and suffix not in _SCALES:
            return
        # What engines serve is compared, also where finer codes are published.
        rows, before = self._served(suffix, _sample(tensor)), self._rows.get(name)
        self._rows[name] = rows
        if before is None or before.shape != rows.shape:
            return
        if suffix == "weight_packed":
            num_columns = layer[f"{owner}.weight_scale"].shape[-1] * self._format.group_size
            differ = torch.ne(*(self._codes(words, num_columns) for words in (rows, before)))
        else:
            # FP8 is compared as bytes, because not every device compares its values.
            one_byte = rows.element_size() == 1
            differ = rows.view(torch.uint8) != before.view(torch.uint8) if one_byte else rows != before
        kinds = ("codes", "codes_in" if reads_norm(owner) else "codes_out") if is_codes else ("scales",)
        size = tensor[..., 0].numel() * differ.shape[-1]
        self._changed.append((kinds, size, differ.mean(dtype=torch.float64)))

    def _served(self, suffix: str, rows: Tensor) -> Tensor:
        return narrow_tensor(suffix, rows, self._format) if self._format.nested_bits else rows

    def _codes(self, words: Tensor, num_columns: int) -> Tensor:
        if words.dtype == torch.uint8:
            return nvfp4.unpack(words)
        return unpack_int32(words, self._format.num_bits, num_columns)


def _sample(tensor: Tensor) -> Tensor:
    # A copy, because the tensor may be the learner's own. An odd step meets other rows in every expert.
    step = -(-tensor.nbytes // _SAMPLE_BYTES) | 1
    return tensor.detach().flatten(0, -2)[::step].clone()
