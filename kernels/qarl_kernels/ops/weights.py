"""A whole weight through the kernels: quantized, prepared for the GEMM, and back to BF16 for the backward."""

from typing import assert_never

import torch
from torch import Tensor

from qarl_formats import QuantFormat
from qarl_kernels.gemm import GemmOperand
from qarl_kernels.nvfp4 import global_divisor, tensor_scale
from qarl_kernels.ops.eight_bit_weights import dequantize_8_bits, quantize_8_bits
from qarl_kernels.ops.integer_weights import CODE_BITS, int4_encode_fp8, integer_dequantize, integer_quantize_pack
from qarl_kernels.ops.nvfp4 import largest_magnitudes, nvfp4_quantize, nvfp4_unscaled
from qarl_kernels.weights import QuantizedWeight, Weights, logical_shape


def quantize_weight_kernel(weight: Weights, fmt: QuantFormat, amax: Tensor | None = None) -> QuantizedWeight:
    """Quantize a BF16 weight in one pass over memory, or two where a global scale comes first.

    Args:
        weight: [..., N, K] BF16, or E tensors [N, K].
        fmt: FP8, INT8, NVFP4, or integers stored in 4 or 8 bits.
        amax: see `dispatch.quantize_weight`.
    """
    if fmt.weight_kind == "nvfp4":
        return _quantize_nvfp4(weight, fmt, amax, emit_unscaled=False)[0]
    return _quantize(weight, fmt, emit="packed")[0]


def quantize_with_operand(
    weight: Weights, fmt: QuantFormat, amax: Tensor | None = None
) -> tuple[QuantizedWeight, GemmOperand]:
    """Quantize and prepare a BF16 weight for the GEMM in the same pass over memory.

    Args:
        weight: [..., N, K] BF16, or E tensors [N, K].
        fmt: FP8, INT8, NVFP4, or integers stored in 4 or 8 bits.
        amax: see `dispatch.quantize_weight`.

    Returns:
        The stored form, and the operand.
    """
    if fmt.weight_kind == "nvfp4":
        quantized, values = _quantize_nvfp4(weight, fmt, amax, emit_unscaled=True)
        assert values is not None
        return quantized, _nvfp4_operand(quantized, values)
    if fmt.nested_bits and fmt.activation_kind == "fp8_token":
        # FP8 is made of the rounded codes, which are int4.
        quantized = quantize_weight_kernel(weight, fmt)
        return quantized, operand_from_weight(quantized.narrowed())
    return _quantize(weight, fmt, emit="fp8" if fmt.activation_kind == "fp8_token" else "bf16")


def _quantize_nvfp4(
    weight: Weights, fmt: QuantFormat, amax: Tensor | None, *, emit_unscaled: bool
) -> tuple[QuantizedWeight, Tensor | None]:
    divisor = global_divisor(largest_magnitudes(weight) if amax is None else amax)
    done = nvfp4_quantize(weight, divisor, emit_unscaled=emit_unscaled)
    tensors = {"weight_packed": done.packed, "weight_scale": done.scale, "weight_global_scale": divisor}
    return QuantizedWeight(fmt, logical_shape(weight), tensors, done.nonfinite), done.unscaled


def _nvfp4_operand(weight: QuantizedWeight, values: Tensor, scale: Tensor | None = None) -> GemmOperand:
    return GemmOperand(weight.format, values, scale, tensor_scale=tensor_scale(weight.tensors["weight_global_scale"]))


def _quantize(weight: Weights, fmt: QuantFormat, *, emit: str) -> tuple[QuantizedWeight, GemmOperand]:
    match fmt.weight_kind:
        case "int":
            return _quantize_integer(weight, fmt, emit=emit)
        case "int8_rows" | "fp8_rows":
            return _quantize_8_bits(weight, fmt, suffix="weight_scale")
        case "fp8_blocks":
            return _quantize_8_bits(weight, fmt, suffix="weight_scale_inv")
        case other:
            raise NotImplementedError(f"{fmt.name}: no kernel here quantizes weights of kind {other}")


def _quantize_integer(weight: Weights, fmt: QuantFormat, *, emit: str) -> tuple[QuantizedWeight, GemmOperand]:
    assert fmt.scale_convention is not None
    grid_bits = fmt.nested_bits or fmt.grid_bits
    bits = {"num_bits": fmt.code_bits, "grid_bits": grid_bits, "served_bits": fmt.grid_bits}
    done = integer_quantize_pack(weight, fmt.group_size, fmt.scale_convention, **bits, emit=emit)
    tensors = {"weight_packed": done.packed, "weight_scale": done.scale}
    values, scale = {
        "packed": (done.packed, done.scale),
        "bf16": (done.dequantized, None),
        "fp8": (done.w8, done.channel_scale),
    }[emit]
    quantized = QuantizedWeight(fmt, logical_shape(weight), tensors, done.nonfinite)
    return quantized, GemmOperand(fmt.narrowed, values, scale)


def _quantize_8_bits(weight: Weights, fmt: QuantFormat, *, suffix: str) -> tuple[QuantizedWeight, GemmOperand]:
    values, scale, nonfinite = quantize_8_bits(weight, fmt.weight_kind)
    tensors = {"weight": values, suffix: scale}
    return QuantizedWeight(fmt, logical_shape(weight), tensors, nonfinite), GemmOperand(fmt, values, scale)


def operand_from_weight(weight: QuantizedWeight, *, packed: bool = False) -> GemmOperand:
    """Prepare a stored weight for the GEMM.

    Args:
        weight: the stored form.
        packed: keep packed 16-bit formats packed, a quarter of the memory at 4 bits and half of it at 8; the GEMM
            unpacks them.
    """
    fmt, tensors = weight.format, weight.tensors
    match fmt.weight_kind:
        case "int":
            return _integer_operand(weight, packed=packed)
        case "nvfp4":
            codes, scale = tensors["weight_packed"], tensors["weight_scale"]
            if packed:
                return _nvfp4_operand(weight, codes.view(torch.int32), scale)
            return _nvfp4_operand(weight, nvfp4_unscaled(codes, scale))
        case "int8_rows" | "fp8_rows":
            return GemmOperand(fmt, tensors["weight"], tensors["weight_scale"])
        case "fp8_blocks":
            return GemmOperand(fmt, tensors["weight"], tensors["weight_scale_inv"])
        case "plain":
            return GemmOperand(fmt, tensors["weight"], None)
        case unknown:
            assert_never(unknown)


def _integer_operand(weight: QuantizedWeight, *, packed: bool) -> GemmOperand:
    fmt = weight.format
    stored = weight.tensors["weight_packed"], weight.tensors["weight_scale"]
    if fmt.activation_kind == "fp8_token":
        return GemmOperand(fmt, *int4_encode_fp8(*stored))
    if fmt.num_bits not in CODE_BITS:
        return GemmOperand(fmt, weight.dequantize(), None)
    return GemmOperand(fmt, *stored) if packed else GemmOperand(fmt, integer_dequantize(*stored, fmt.num_bits), None)


def dequantize_operand(operand: GemmOperand) -> Tensor:
    """Return the weight an operand multiplies by: bf16(code * scale), bf16(w8 * scale), bf16(code * scale / G).

    Args:
        operand: [..., N, K].

    Returns:
        [..., N, K] BF16.
    """
    if operand.tensor_scale is not None:
        values = operand.values
        if operand.is_packed:
            assert operand.scale is not None
            values = nvfp4_unscaled(values.view(torch.uint8), operand.scale)
        row_scale = operand.tensor_scale.expand(*values.shape[:-1], 1).contiguous()
        return dequantize_8_bits(values, row_scale)
    if operand.scale is None:
        return operand.values
    if operand.is_packed:
        return integer_dequantize(operand.values, operand.scale, operand.format.num_bits)
    return dequantize_8_bits(operand.values, operand.scale, block=operand.format.weight_kind == "fp8_blocks")
