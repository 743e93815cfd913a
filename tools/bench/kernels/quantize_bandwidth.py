"""How much of a device copy's bandwidth the weight and activation quantizers reach, bytes read and written once."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from device_time import copy_gb_s, interleaved_ms
from moe_shapes import HIDDEN, INTERMEDIATE, expert_weights
from record import record
from torch import Tensor

from qarl_kernels import get_format
from qarl_kernels.nvfp4 import global_divisor
from qarl_kernels.ops.activations import quantize_group, quantize_token
from qarl_kernels.ops.eight_bit_weights import quantize_8_bits
from qarl_kernels.ops.integer_weights import int4_encode_fp8, integer_dequantize, integer_quantize_pack
from qarl_kernels.ops.nvfp4 import largest_magnitudes, nvfp4_quantize, nvfp4_unscaled
from qarl_kernels.ops.swiglu import swiglu, swiglu_quantize_group, swiglu_quantize_token
from qarl_kernels.ops.weights import quantize_weight_kernel
from qarl_kernels.weights import quantize_weight_reference
from qarl_nemo.metrics.results import Figure

GOAL = 0.85


def require_equal_codes(weight: Tensor) -> None:
    """Exit unless the integer kernels' codes and scales are the reference's."""
    for fmt in (get_format("w4a16"), get_format("w8a16"), get_format("w4a16", nested_in="w8a16")):
        expected = quantize_weight_reference(weight, fmt, name="weight").tensors
        for suffix, actual in quantize_weight_kernel(weight, fmt).tensors.items():
            if not torch.equal(actual, expected[suffix]):
                raise SystemExit(f"nothing is reported: {suffix} of {fmt.name} differs from the reference")


def moved_bytes(inputs: tuple[Tensor, ...], result: Any) -> int:
    """Return the bytes of all inputs and of every tensor in a result."""
    parts = list(inputs)
    pending = [result]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            parts.append(item)
        elif isinstance(item, tuple):
            pending += item
        elif item is not None and not isinstance(item, int | str):
            pending += [getattr(item, field) for field in item.__dataclass_fields__]
    return sum(part.nbytes for part in parts)


def bandwidth(name: str, function: Callable[..., Any], *inputs: Tensor, copy: float, goal: float | None) -> Figure:
    """Time one operator.

    Args:
        name: the figure's name, without `_bandwidth`.
        function: the operator.
        inputs: its tensors.
        copy: bandwidth of a copy in GB/s.
        goal: fraction to reach.

    Returns:
        The fraction of the copy's bandwidth.
    """
    num_bytes = moved_bytes(inputs, function(*inputs))
    ms = interleaved_ms({name: lambda: function(*inputs)})[name]
    return Figure(f"{name}_bandwidth", num_bytes / ms / 1e6 / copy, "", ">=", goal)


def weight_figures(copy: float, num_experts: int) -> Iterator[Figure]:
    """Yield the figures of weight quantizers on both projections of one layer."""
    for projection, weight in zip(("fc1", "fc2"), expert_weights(num_experts), strict=True):
        require_equal_codes(weight[:4])
        suffix = "" if projection == "fc1" else "_fc2"
        stored, divisor = integer_quantize_pack(weight, 128, "full_range"), global_divisor(largest_magnitudes(weight))
        wide = integer_quantize_pack(weight, 128, "full_range", num_bits=8)
        fp4 = nvfp4_quantize(weight, divisor)
        for kind, options in (
            ("int4_quantize_pack", {}),
            ("int4_quantize_pack_bf16", {"emit": "bf16"}),
            ("int4_quantize_pack_fp8", {"emit": "fp8"}),
            ("int8_quantize_pack_bf16", {"num_bits": 8, "emit": "bf16"}),
            ("nested_quantize_pack_bf16", {"num_bits": 8, "served_bits": 4, "emit": "bf16"}),
        ):
            quantize = partial(integer_quantize_pack, group_size=128, scale_convention="full_range", **options)
            yield bandwidth(f"{kind}{suffix}", quantize, weight, copy=copy, goal=GOAL)
        for name, function, inputs in (
            ("int4_dequantize", integer_dequantize, (stored.packed, stored.scale)),
            ("int8_dequantize", partial(integer_dequantize, num_bits=8), (wide.packed, wide.scale)),
            ("int4_encode_fp8", int4_encode_fp8, (stored.packed, stored.scale)),
            ("fp8_channel_quantize", partial(quantize_8_bits, kind="fp8_rows"), (weight,)),
            ("fp8_block_quantize", partial(quantize_8_bits, kind="fp8_blocks"), (weight,)),
            ("int8_channel_quantize", partial(quantize_8_bits, kind="int8_rows"), (weight,)),
            ("nvfp4_largest_magnitudes", largest_magnitudes, (weight,)),
            ("nvfp4_quantize", nvfp4_quantize, (weight, divisor)),
            ("nvfp4_unscaled", nvfp4_unscaled, (fp4.packed, fp4.scale)),
        ):
            yield bandwidth(f"{name}{suffix}", function, *inputs, copy=copy, goal=GOAL)


def activation_figures(copy: float, num_rows: int) -> Iterator[Figure]:
    """Yield the figures of activation quantizers, fused and alone."""
    x = torch.randn(num_rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(num_rows, 2 * INTERMEDIATE, device="cuda", dtype=torch.bfloat16)
    for name, function, tensor in (
        ("quantize_token", quantize_token, x),
        ("quantize_group", quantize_group, x),
        ("quantize_token_int8", partial(quantize_token, kind="int8_token"), x),
        ("swiglu", swiglu, hidden),
        ("swiglu_quantize_token", swiglu_quantize_token, hidden),
        ("swiglu_quantize_group", swiglu_quantize_group, hidden),
        ("swiglu_quantize_token_int8", partial(swiglu_quantize_token, kind="int8_token"), hidden),
    ):
        yield bandwidth(name, function, tensor, copy=copy, goal=GOAL)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rows", type=int, default=180224)
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_gb_s()
    figures = [Figure("copy_gb_s", copy, "GB/s", ">="), *weight_figures(copy, options.experts)]
    figures += activation_figures(copy, options.rows)
    record(figures, options.record)


if __name__ == "__main__":
    main()
