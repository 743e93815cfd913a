"""Weights that lie half-way between two codes: the smallest step moves each of them by a whole code.

A checkpoint that was dequantized from another grid, as files of llama.cpp's are, may put many weights there. An update
can then flip them however small it is, and move the policy further than its gradients ask for.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from qarl_formats import SCALE_CONVENTIONS
from qarl_kernels import QuantFormat
from qarl_kernels.integer import quantize_integer
from qarl_nemo.layers.weight import AlignedWeight

# How near to the middle counts, in steps of the grid, and the share of evenly spread weights that is as near.
_NEAR = 1 / 64
BY_CHANCE = 2 * _NEAR
# Of a real model 0.02 to 0.05 on most grids, 0.12 to 0.38 on those that met an older one (docs/design/formats.md).
_TOO_MANY = 0.1
_SAMPLE = 1 << 18


def tied_share(weights: Iterable[Tensor], fmt: QuantFormat) -> float:
    """Return the share of weights with | w / scale - (c + 1/2) | < 1/64 for two codes c and c + 1.

    What lies beyond the largest code cannot flip: in `full_range` a group's largest weight, if it is positive.

    Args:
        weights: [..., N, K] each; evenly spaced rows of the large ones are counted.
        fmt: an integer format with groups; a nested one's codes are those that it publishes.
    """
    convention = fmt.scale_convention
    assert convention is not None
    tied = total = 0
    for weight in weights:
        rows = weight.detach().flatten(0, -2)
        rows = rows[:: max(1, rows.numel() // _SAMPLE)]
        num_bits = fmt.nested_bits or fmt.grid_bits
        _, scale = quantize_integer(rows, num_bits, fmt.group_size, convention)
        steps = rows.float().unflatten(-1, (-1, fmt.group_size)) / scale.float().unsqueeze(-1)
        below = steps.floor()
        half_way = ((steps - below - 0.5).abs() < _NEAR) & (below < 2 ** (num_bits - 1) - 1)
        tied += int(half_way.sum())
        total += rows.numel()
    return tied / total if total else 0.0


def tie_warning(weights: Iterable[AlignedWeight], formats: Iterable[QuantFormat]) -> str:
    """Return a warning of the grids on which too many weights lie half-way between two codes; empty without any.

    Args:
        weights: what is trained.
        formats: what the engine serves, one for each stage of a run.
    """
    masters = [master for weight in weights for master in weight.masters if master.device.type != "meta"]
    found = {fmt: tied_share(masters, fmt) for fmt in formats if fmt.weight_kind == "int"}
    fmt = max(found, key=lambda one: found[one], default=None)
    if fmt is None or found[fmt] <= _TOO_MANY:
        return ""
    others = [replace(fmt, scale_convention=name) for name in SCALE_CONVENTIONS if name != fmt.scale_convention]
    shares = ", ".join(f"{other.scale_convention} has {tied_share(masters, other):.1%}" for other in others)
    return (
        f"{found[fmt]:.1%} of the trained weights lie half-way between two codes of {fmt.grid_bits} bits "
        f"({fmt.scale_convention}, groups of {fmt.group_size}; {BY_CHANCE:.1%} would by chance), where any step flips "
        f"them: the checkpoint was on another grid once. Choose another qarl.scale_convention ({shares}) or "
        "qarl.nested_in"
    )
