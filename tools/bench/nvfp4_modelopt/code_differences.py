"""How two NVFP4 forms of one weight differ, and why: counts that add up over the weights of a model.

Both quantizers compute s = 448 * amax(group) / amax(W) and w / (s / G) in FP32, from G here and from 1 / G there. BF16
weights have so few bits that many of these quotients lie exactly half-way between two numbers of the grid; then the
last bit of G or 1 / G decides. G itself is 2688 times a rounded 1 / amax(W) here, and 1 / G is amax(W) / 2688 there, so
that the two differ by four roundings at most. Differences of any other kind are counted as `unexplained`.
"""

from collections import Counter

import torch
from modelopt_model import Exported
from torch import Tensor

from qarl_kernels import QuantizedWeight, nvfp4
from qarl_kernels.fp8 import FP8_MAX
from qarl_nemo.metrics.results import Figure

# Relative distance from half-way that the roundings of G or 1 / G, of a scale over it and of a quotient can bridge.
_TIE = 4 * torch.finfo(torch.float32).eps
# Three roundings on the way from amax(W) to our 1 / G, one to ModelOpt's, of half an eps each.
_ROUNDINGS = 2 * torch.finfo(torch.float32).eps


def count_differences(weight: Tensor, amax: Tensor, ours: QuantizedWeight, theirs: Exported) -> Counter[str]:
    """Compare codes, group scales and global scale.

    Args:
        weight: [N, K] BF16.
        amax: [1] FP32, the largest magnitude of all weights that share the global scale.
        ours: its form by `quantize_weight`.
        theirs: its form by ModelOpt.

    Returns:
        Counts: `weights`, `global_scales_equal`, `bytes` and `bytes_equal` of the packed codes, `scales` and
        `scales_equal`, and of what differs: `scales_of_zeros`, `scales_tied`, `codes_scaled` in groups whose scales
        differ, `codes_tied` in others, `unexplained`.
    """
    groups = weight.double().unflatten(-1, (-1, nvfp4.GROUP))
    scales = [form.double() for form in (ours.tensors["weight_scale"], theirs.scale)]
    packed = ours.tensors["weight_packed"], theirs.packed
    largest = groups.abs().amax(-1)
    other = scales[0] != scales[1]
    zeros = other & (largest == 0)
    tied = other & ~zeros & _half_way(FP8_MAX * largest / amax.double(), *scales)
    grid = torch.tensor(nvfp4.GRID, dtype=torch.float64, device=weight.device)
    values = [grid[nvfp4.unpack(one).long() & 7].view_as(groups) for one in packed]
    differs = (nvfp4.unpack(packed[0]) != nvfp4.unpack(packed[1])).view_as(groups)
    kept = differs & ~other[..., None]
    exact = groups.abs() * (FP8_MAX * nvfp4.FP4_MAX / amax.double()) / scales[0][..., None]
    codes_tied = kept & _half_way(exact, *values)
    one, two = nvfp4.tensor_scale(ours.tensors["weight_global_scale"]).view(1), theirs.global_scale.view(1)
    far = (one.double() - two.double()).abs() > _ROUNDINGS * two.double()
    return Counter(
        weights=1,
        global_scales_equal=int(torch.equal(one, two)),
        bytes=packed[0].numel(),
        bytes_equal=int((packed[0] == packed[1]).sum()),
        scales=other.numel(),
        scales_equal=int((~other).sum()),
        scales_of_zeros=int(zeros.sum()),
        scales_tied=int(tied.sum()),
        codes_scaled=int((differs & other[..., None]).sum()),
        codes_tied=int(codes_tied.sum()),
        unexplained=int(far.sum() + (other & ~zeros & ~tied).sum() + (kept & ~codes_tied).sum()),
    )


def code_figures(counts: Counter[str]) -> list[Figure]:
    """Return what a model's tensors, counted by `count_differences`, have in common, and why the others differ."""
    shares = {"global_scales": "weights", "scales": "scales", "bytes": "bytes"}
    kinds = ("scales_of_zeros", "scales_tied", "codes_scaled", "codes_tied")
    figures = [
        Figure(f"equal_{name}", counts[f"{name}_equal"] / counts[total], "fraction", ">=")
        for name, total in shares.items()
    ]
    figures += [Figure(name, counts[name], "", "<=") for name in ("bytes", "scales", *kinds)]
    return [*figures, Figure("unexplained", counts["unexplained"], "", "==", 0.0)]


def _half_way(exact: Tensor, one: Tensor, other: Tensor) -> Tensor:
    middle = (one + other) / 2
    return (exact - middle).abs() <= _TIE * middle
