"""The one quantizer that the forward and the publisher share: from a weight to the tensors that are stored and sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from qarl_formats import FP8_BLOCK, QuantFormat
from qarl_kernels import fp8, int8, integer, nvfp4
from qarl_kernels.nested import narrow_tensor

Weights = Tensor | Sequence[Tensor]
"""Weights [..., N, K], or E tensors [N, K] wherever they lie."""
TOO_LARGE = (
    "or magnitudes beyond BF16's range of 3.39e38, to which weights are rounded, of 2^127 and more for integer "
    "codes, of 2^20 and more for nvfp4"
)


def logical_shape(weight: Weights) -> tuple[int, ...]:
    """Return the shape of a weight, or of the stack of several."""
    return tuple(weight.shape) if isinstance(weight, Tensor) else (len(weight), *weight[0].shape)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in its stored form.

    Attributes:
        format: the format that produced it.
        shape: logical shape [..., N, K].
        tensors: stored tensors by checkpoint suffix: `weight_packed` + `weight_scale` (integer), these and
            `weight_global_scale` (nvfp4), `weight` + `weight_scale_inv` (fp8_block), `weight` + `weight_scale`
            (fp8_channel, int8), `weight` (bf16).
        nonfinite: int32 count of `unfit_values` on the device, not yet read (`require_finite` does); None if they were
            refused at once.
    """

    format: QuantFormat
    shape: tuple[int, ...]
    tensors: dict[str, Tensor]
    nonfinite: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Stored size in bytes, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def narrowed(self) -> "QuantizedWeight":
        """Return what engines hold of it: itself, or nested codes rounded to the format's grid."""
        if not self.format.nested_bits:
            return self
        tensors = {suffix: narrow_tensor(suffix, tensor, self.format) for suffix, tensor in self.tensors.items()}
        return QuantizedWeight(self.format.narrowed, self.shape, tensors, self.nonfinite)

    def codes(self) -> Tensor:
        """Return the integer codes [..., N, K] int8 of an integer format, as they are stored."""
        assert self.format.weight_kind == "int"
        return integer.unpack_int32(self.tensors["weight_packed"], self.format.code_bits, self.shape[-1])

    def dequantize(self) -> Tensor:
        """Return the served weight as numbers: code * scale (integer, in BF16) or bf16(w * scale) (FP8, INT8, NVFP4).

        A GEMM multiplies `GemmOperand.effective_weight`: the same numbers, except that w4a8's engine re-encodes the
        stored int4 weight to FP8 (`fp8.encode_int4_as_fp8`) and products of 8-bit numbers are not rounded to BF16.

        Returns:
            [..., N, K] BF16.
        """
        match self.format.weight_kind:
            case "int":
                served = self.narrowed()
                return integer.dequantize_integer(served.codes(), served.tensors["weight_scale"])
            case "nvfp4":
                values = nvfp4.unscaled(self.tensors["weight_packed"], self.tensors["weight_scale"])
                factor = nvfp4.tensor_scale(self.tensors["weight_global_scale"])
                return (values.float() * factor).to(torch.bfloat16)
            case "int8_rows" | "fp8_rows":
                return (self.tensors["weight"].float() * self.tensors["weight_scale"]).to(torch.bfloat16)
            case "fp8_blocks":
                scale = fp8.expand_block_scale(self.tensors["weight_scale_inv"], *self.shape[-2:])
                return (self.tensors["weight"].float() * scale).to(torch.bfloat16)
            case "plain":
                return self.tensors["weight"]
            case unknown:
                assert_never(unknown)


def stored_layout(shape: tuple[int, ...], fmt: QuantFormat) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the stored tensors' shapes and dtypes without quantizing anything.

    Args:
        shape: logical shape [..., N, K].
        fmt: the format.

    Returns:
        Checkpoint suffix -> (shape, dtype).
    """
    *batch, rows, columns = shape
    match fmt.weight_kind:
        case "int":
            words = -(-columns * fmt.code_bits // 32)
            return {
                "weight_packed": ((*batch, rows, words), torch.int32),
                "weight_scale": ((*batch, rows, columns // fmt.group_size), torch.bfloat16),
            }
        case "nvfp4":
            return {
                "weight_packed": ((*batch, rows, columns // 2), torch.uint8),
                "weight_scale": ((*batch, rows, columns // nvfp4.GROUP), torch.float8_e4m3fn),
                "weight_global_scale": ((*batch, 1), torch.float32),
            }
        case "int8_rows" | "fp8_rows" as rows_of:
            dtype = torch.int8 if rows_of == "int8_rows" else torch.float8_e4m3fn
            return {"weight": (shape, dtype), "weight_scale": ((*batch, rows, 1), torch.float32)}
        case "fp8_blocks":
            blocks = (*batch, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            return {"weight": (shape, torch.float8_e4m3fn), "weight_scale_inv": (blocks, torch.float32)}
        case "plain":
            return {"weight": (shape, torch.bfloat16)}
        case unknown:
            assert_never(unknown)


def weight_problems(shape: tuple[int, ...], fmt: QuantFormat) -> list[str]:
    """Say why a weight of this shape cannot be stored in this format; an empty list if it can.

    Args:
        shape: [..., N, K].
        fmt: the format.
    """
    if len(shape) < 2:
        return [f"needs at least two dimensions [N, K], got shape {list(shape)}"]
    if 0 in shape[-2:]:
        return [f"needs at least one row and one column, got shape {list(shape)}"]
    columns = shape[-1]
    match fmt.weight_kind:
        case "int":
            unit, said = fmt.group_size, f"group_size={fmt.group_size}"
        case "nvfp4":
            unit, said = nvfp4.GROUP, f"{nvfp4.GROUP}, the group of nvfp4"
        case "fp8_blocks":
            unit, said = FP8_BLOCK, f"{FP8_BLOCK}, the activation group of fp8_block"
        case "int8_rows" | "fp8_rows" | "plain":
            return []
        case unknown:
            assert_never(unknown)
    if columns % unit == 0:
        return []
    legal = [size for size in fmt.group_sizes if columns % size == 0]
    fitting = legal or f"none of {', '.join(map(str, fmt.group_sizes))}"
    choice = f" (group sizes that divide it: {fitting})" if fmt.group_sizes else ""
    return [f"K={columns} is not a multiple of {said}{choice}"]


def quantize_weight_reference(
    weight: Tensor, fmt: QuantFormat, *, name: str, amax: Tensor | None = None
) -> QuantizedWeight:
    """Quantize a BF16 weight in torch: what every other quantizer must equal bit for bit.

    On a GPU `unfit_values` are only counted, because looking at them would wait for the device.

    Args:
        weight: [..., N, K] BF16 of a shape without `weight_problems`.
        fmt: the format.
        name: what to call the weight in errors.
        amax: see `dispatch.quantize_weight`.

    Raises:
        ValueError: on a CPU, the weight holds `unfit_values` (tensor and first index named).
    """
    nonfinite = None
    if weight.is_cuda:
        nonfinite = (~(weight.abs() < _least_unfit(fmt))).sum(dtype=torch.int32)
    elif (problem := unfit_values(weight, fmt, name)) is not None:
        raise nonfinite_error([problem])
    return QuantizedWeight(fmt, tuple(weight.shape), _stored_tensors(weight, fmt, amax), nonfinite)


def _stored_tensors(weight: Tensor, fmt: QuantFormat, amax: Tensor | None) -> dict[str, Tensor]:
    match fmt.weight_kind:
        case "int":
            assert fmt.scale_convention is not None
            grid_bits = fmt.nested_bits or fmt.grid_bits
            codes, scale = integer.quantize_integer(weight, grid_bits, fmt.group_size, fmt.scale_convention)
            return {"weight_packed": integer.pack_int32(codes, fmt.code_bits), "weight_scale": scale}
        case "nvfp4":
            divisor = nvfp4.global_divisor(largest_reference(weight) if amax is None else amax)
            codes, scale = nvfp4.quantize(weight, divisor)
            return {"weight_packed": nvfp4.pack(codes), "weight_scale": scale, "weight_global_scale": divisor}
        case "int8_rows":
            values, scale = int8.quantize_channel(weight)
            return {"weight": values, "weight_scale": scale}
        case "fp8_rows":
            values, scale = fp8.quantize_channel(weight)
            return {"weight": values, "weight_scale": scale}
        case "fp8_blocks":
            values, scale = fp8.quantize_block(weight)
            return {"weight": values, "weight_scale_inv": scale}
        case "plain":
            return {"weight": weight.clone()}
        case unknown:
            assert_never(unknown)


def largest_reference(weight: Tensor) -> Tensor:
    """Return the largest magnitude of bf16(weight), [..., 1] FP32 for [..., N, K]; see `dispatch.largest`."""
    return weight.abs().amax((-2, -1)).to(torch.bfloat16).float().unsqueeze(-1)


def unfit_values(weight: Tensor, fmt: QuantFormat, name: str) -> str | None:
    """Say which values of a weight a format cannot hold: NaN, Inf and magnitudes with which something overflows.

    Integer formats, from 2^127 on: code * scale may overflow BF16, in the learner's forward and in the engine's alike,
    because scales are rounded, and the most negative code is further from zero than the group's largest value.
    nvfp4, from 2^20 on: the global scale overflows in the engine.

    Args:
        weight: any floating-point tensor; it is judged after rounding to BF16.
        fmt: the format.
        name: what to call the weight.

    Returns:
        Name, shape, number of such values and the first one, and whether it becomes infinite in BF16; None if there is
        none.
    """
    limit = _least_unfit(fmt)
    # The largest magnitude is NaN or too large exactly if some value is, and is found ten times as fast as all of them.
    if not weight.numel() or weight.abs().max().to(torch.bfloat16) < limit:
        return None
    bad = (~(weight.to(torch.bfloat16).abs() < limit)).nonzero()
    first = bad[0].tolist()
    value = weight[tuple(first)]
    beyond = ", beyond BF16's range" if value.isfinite() and value.to(torch.bfloat16).isinf() else ""
    return f"{name} {list(weight.shape)} ({len(bad)}, the first at index {first}: {value.item()}{beyond})"


def _least_unfit(fmt: QuantFormat) -> float:
    match fmt.weight_kind:
        case "int":
            return integer.OVERFLOW
        case "nvfp4":
            return nvfp4.OVERFLOW
        case "int8_rows" | "fp8_rows" | "fp8_blocks" | "plain":
            return float("inf")
        case unknown:
            assert_never(unknown)


def nonfinite_error(weights: list[str]) -> ValueError:
    """Return the error for weights that hold `unfit_values`.

    Args:
        weights: each weight's name and count.
    """
    return ValueError(
        f"NaN or Inf in {len(weights)} weight{'s' * (len(weights) != 1)} ({TOO_LARGE}), with the number of such "
        f"values, or on a GPU of groups, rows or blocks that hold some: {', '.join(weights)}; "
        "a quantized copy would spread them over their whole groups"
    )
