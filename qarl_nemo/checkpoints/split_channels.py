"""Outlier channel splitting: the inner channels of an MLP whose outliers coarsen the grid of `down_proj` become pairs.

A group's scale follows its largest weight, so that one outlier costs all of its neighbours precision. An inner channel
x_i = silu(g_i) u_i may be computed twice, by copies of its rows of gate and up, while its column of down is divided:

    x w  =  x (w/2 + s/4)  +  x (w/2 - s/4)

The model computes what it did, as one of greater width, which every engine serves. The column's part in the scales is
halved. The shift by a quarter of the grid's step s makes the pair's rounding errors cancel: rounded, the two halves add
up to what w rounds to on a grid of step s, a quarter of the squared error that equal halves have. They therefore stand
side by side, in one group. BF16 has no such grid, and its halves are equal, which is exact.

Source: arXiv 2604.07888, outlier channel splitting.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_formats import BASELINE, QuantFormat, get_format
from qarl_kernels import unfit_values
from qarl_kernels.integer import integer_grid
from qarl_nemo.checkpoints.reader import TensorInfo, TensorReader

# What else BF16 models are served in may need of a width.
_WIDTH_MULTIPLE = 128
_WIDTHS = {"experts": "moe_intermediate_size", "mlp": "intermediate_size"}
_DOWN = "down_proj.weight"
# Channels are chosen a part at a time: one that is halved makes way for the next largest of its group.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Splitting:
    """How many inner channels are split.

    Attributes:
        share: the least share of them, above 0 and at most 1.
        widths: target -> inner channels before and after.
    """

    share: float
    widths: Mapping[str, tuple[int, int]]

    @property
    def config(self) -> dict[str, int]:
        """The sizes of config.json that change."""
        return {_WIDTHS[target]: after for target, (_, after) in self.widths.items()}

    def shape(self, name: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor once channels are split.

        Args:
            name: checkpoint name of a weight or a bias.
            kind: what the module that owns it is.
            shape: its shape before.

        Returns:
            [I', H] for gate and up, [H, I'] for down, and their biases' likewise; others as they are.
        """
        if kind not in self.widths:
            return shape
        after = self.widths[kind][1]
        if "down_proj" not in name:
            return (after, *shape[1:])
        return (*shape[:-1], after) if len(shape) > 1 else shape

    def ordered_by(self, name: str, kind: str, shape: tuple[int, ...]) -> str | None:
        """Return the weight that decides which channels of a tensor are split; None if none are.

        Args:
            name: checkpoint name of a weight or a bias.
            kind: what the module that owns it is.
            shape: its shape before.
        """
        return f"{name.rsplit('.', 2)[0]}.{_DOWN}" if self.shape(name, kind, shape) != tuple(shape) else None


def plan_splitting(share: float, widths: Mapping[str, int], fmt: QuantFormat) -> Splitting:
    """Choose widths that the format's kernels take.

    Args:
        share: the least share of inner channels to split.
        widths: target -> inner channels.
        fmt: what the checkpoint is quantized to.

    Returns:
        The splitting: widths grow to the next legal multiple.

    Raises:
        ValueError: the share or the format leaves nothing to split; every problem is listed.
    """
    problems = []
    if not 0 < share <= 1:
        problems.append(f"split_channels={share} is not above 0 and at most 1")
    if fmt.weight_kind not in ("int", "int8_rows", "plain"):
        problems.append(
            f"format {fmt.name} has no grid of equal steps, which splitting refines; use an integer format, or bf16"
        )
    if not widths:
        problems.append("split_channels splits the inner channels of experts or mlp; targets name neither")
    if problems:
        raise ValueError("; ".join(problems))
    grown = {target: (width, _legal_width(target, width, share, fmt)) for target, width in widths.items()}
    too_wide = [
        f"{width} {target} channels -> {after}" for target, (width, after) in grown.items() if after > 2 * width
    ]
    if too_wide:
        raise ValueError(f"split_channels={share} would split channels more than once: {', '.join(too_wide)}")
    return Splitting(share, grown)


def _legal_width(target: str, width: int, share: float, fmt: QuantFormat) -> int:
    roles = ("experts_in", "experts_out") if target == "experts" else ("linear", "linear")
    rows, columns = fmt.multiples(roles[0])[0], fmt.multiples(roles[1])[1]
    multiple = math.lcm(rows, columns) if fmt.is_quantized else _WIDTH_MULTIPLE
    # Rounded first, because a share of 1/6 is none of a computer's numbers.
    least = width + math.ceil(round(width * share, 6))
    return -(-least // multiple) * multiple


class ChannelSplitter:
    """Splits the channels of one MLP after another.

    Args:
        splitting: how many.
        reader: reads the source.
        infos: the source's tensors by name.
        fmt: what the checkpoint is quantized to.
    """

    def __init__(
        self, splitting: Splitting, reader: TensorReader, infos: Mapping[str, TensorInfo], fmt: QuantFormat
    ) -> None:
        self._splitting, self._reader, self._infos, self._format = splitting, reader, infos, fmt
        self._down, self._order = "", torch.empty(0)

    def read(self, name: str, kind: str) -> Tensor:
        """Read a tensor, with its channels split if it has any.

        Args:
            name: checkpoint name.
            kind: what the module that owns it is.

        Returns:
            The tensor, of `Splitting.shape`; split columns that are shifted in FP32, and in BF16 where nothing is
            quantized. One with NaN or Inf as it is.
        """
        info = self._infos[name]
        weight = self._reader.read(info)
        down = self._splitting.ordered_by(name, kind, info.shape)
        if down is None:
            return weight
        if unfit_values(weight, get_format(BASELINE), name):
            # It is refused next, with the shape and the place that it has in the source.
            return weight
        weight, order = self._rounded(weight), self._order_of(down, kind)
        return split_columns(weight, order, self._format) if name.endswith(_DOWN) else weight[order]

    def _order_of(self, down: str, kind: str) -> Tensor:
        if down != self._down:
            before, after = self._splitting.widths[kind]
            weight = self._rounded(self._reader.read(self._infos[down]))
            self._down, self._order = down, channel_order(weight, after - before, _group_size(self._format))
        return self._order

    def _rounded(self, weight: Tensor) -> Tensor:
        # Rounded afterwards, halves of FP16 or FP32 need not add up to what the whole is rounded to.
        return weight if self._format.is_quantized else weight.to(torch.bfloat16)


def channel_order(down: Tensor, num_split: int, group_size: int) -> Tensor:
    """Choose the channels to split, and the places of all, so that no pair is in two groups.

    Chosen are those whose halving most lowers the squared scales of their groups, over all rows.

    Args:
        down: [H, I].
        num_split: how many are split.
        group_size: elements per scale along I; 0: a row has one scale.

    Returns:
        [I + num_split] int64: which channel stands in each place; split ones twice in a row.
    """
    chosen = _outliers(down.float().abs(), num_split, group_size)
    size = group_size or down.shape[1] + num_split
    # Groups have an even number of places, so that a pair always finds two in the end.
    waiting = dict.fromkeys(range(down.shape[1]))
    order: list[int] = []
    while waiting:
        full = len(order) % size == size - 1
        channel = next(one for one in waiting if not (full and one in chosen))
        order += [channel] * (2 if channel in chosen else 1)
        del waiting[channel]
    return torch.tensor(order)


def _group_size(fmt: QuantFormat) -> int:
    return fmt.group_size if fmt.is_quantized else _WIDTH_MULTIPLE


def _outliers(magnitude: Tensor, num_split: int, group_size: int) -> set[int]:
    magnitude, chosen = magnitude.clone(), set()
    for number in range(_ROUNDS):
        gain = _gain(magnitude, group_size or magnitude.shape[1])
        gain[list(chosen)] = -1.0
        new = gain.topk(num_split * (number + 1) // _ROUNDS - len(chosen)).indices
        magnitude[:, new] /= 2
        chosen |= set(new.tolist())
    return chosen


def _gain(magnitude: Tensor, size: int) -> Tensor:
    num_channels = magnitude.shape[1]
    groups = torch.nn.functional.pad(magnitude, (0, -num_channels % size)).unflatten(1, (-1, size))
    largest, places = groups.max(-1, keepdim=True)
    second = groups.scatter(-1, places, 0.0).amax(-1, keepdim=True)
    lowered = largest.square() - torch.maximum(second, largest / 2).square()
    return torch.zeros_like(groups).scatter(-1, places, lowered).sum(0).flatten()[:num_channels]


def split_columns(down: Tensor, order: Tensor, fmt: QuantFormat) -> Tensor:
    """Divide the split columns of down, shifted by a quarter of the step of the grid that they will lie on.

    Args:
        down: [H, I].
        order: what `channel_order` returned.
        fmt: what it is quantized to.

    Returns:
        [H, I'], FP32; down's dtype where nothing is shifted.
    """
    is_first = torch.zeros(len(order), dtype=torch.bool)
    is_first[:-1] = order[:-1] == order[1:]
    is_second = is_first.roll(1)
    is_half = is_first | is_second
    if not fmt.is_quantized:
        return torch.where(is_half, down[:, order] / 2, down[:, order])
    wide = down[:, order].float()
    halves = torch.where(is_half, wide / 2, wide)
    shift = _step(halves, is_half, fmt) / 4
    return halves + shift * (is_first.float() - is_second.float())


def _step(weight: Tensor, is_half: Tensor, fmt: QuantFormat) -> Tensor:
    # The step follows the largest weight, and a shifted half may be it: two rounds come close enough.
    size = fmt.group_size or weight.shape[1]
    groups, halves = weight.abs().unflatten(1, (-1, size)), is_half.unflatten(0, (-1, size))
    step = torch.zeros(())
    for _ in range(2):
        step = (groups + torch.where(halves, step / 4, 0)).amax(-1, keepdim=True) / _divisor(fmt)
    return step.expand_as(groups).flatten(1)


def _divisor(fmt: QuantFormat) -> float:
    if fmt.weight_kind == "int8_rows":
        return integer_grid(8, "narrow_range")[2]
    assert fmt.scale_convention is not None
    bits = fmt.nested_bits or fmt.grid_bits
    return integer_grid(bits, fmt.scale_convention)[2] / 2 ** (bits - fmt.grid_bits)
