"""Grouped GEMMs by format: quantize the activations as the format says, then run the fastest kernel for the operand.

Measured on an H200 (docs/evidence/kernels.md): cuBLAS is fastest for one expert in BF16, our grouped GEMM for several;
FP8 is fastest in the warp-specialised kernels wherever shapes allow. Packed int4 is dequantized inside the GEMM while
experts have few rows: there the time goes into reading weights, of which it reads a quarter of the bytes. Packed NVFP4
is treated alike, but was not measured. Packed codes of 8 bits are always dequantized first. INT8 has one grouped GEMM,
for one expert and for several.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_formats import FP8_BLOCK, QuantFormat
from qarl_kernels.gemm import GemmOperand
from qarl_kernels.ops.activations import quantize_group, quantize_token
from qarl_kernels.ops.grouped_gemm import grouped_gemm_bf16, grouped_gemm_channel, grouped_gemm_fp8_block
from qarl_kernels.ops.hopper_fp8 import (
    HOPPER,
    hopper_grouped_gemm_fp8_block,
    hopper_grouped_gemm_fp8_channel,
)
from qarl_kernels.ops.int4_gemm import COLUMN_MULTIPLE, grouped_gemm_int4
from qarl_kernels.ops.integer_weights import integer_dequantize
from qarl_kernels.ops.nvfp4 import nvfp4_unscaled
from qarl_kernels.ops.swiglu import swiglu, swiglu_quantize_group, swiglu_quantize_token
from qarl_kernels.ops.token_rounding import TOKEN_DTYPES
from qarl_kernels.ops.wgrad import grouped_wgrad
from qarl_kernels.routing import rows_scale
from qarl_kernels.weights import Weights

# Rows per expert up to which reading a quarter of the weight bytes saves more time than dequantizing per tile costs.
FUSED_INT4_MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A GEMM's input as its format multiplies it.

    Attributes:
        values: [M, K] BF16, E4M3 or INT8.
        scale: [M, 1] per token or [M, K / 128] per group, FP32; None for BF16.
    """

    values: Tensor
    scale: Tensor | None


def quantize_rows(x: Tensor, fmt: QuantFormat, *, after_swiglu: bool = False, dense: bool = False) -> QuantizedRows:
    """Quantize activations as the format says.

    Args:
        x: [M, K] BF16.
        fmt: the format.
        after_swiglu: x is a SwiGLU output.
        dense: a dense layer multiplies them, and not a routed expert.

    Returns:
        The rows; x itself for 16-bit activations.
    """
    x = x.contiguous()
    if fmt.activation_kind == "none":
        return QuantizedRows(x, None)
    if fmt.activation_kind in TOKEN_DTYPES:
        return QuantizedRows(*quantize_token(x, fmt.activation_kind, dense=dense))
    return QuantizedRows(*quantize_group(x, after_swiglu=after_swiglu))


def multiply_rows(
    rows: QuantizedRows,
    weight: GemmOperand,
    offsets: Tensor,
    *,
    row_weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply quantized rows, each by its expert's weight; y = round(x_q W_q^T), times the router weight if given.

    Args:
        rows: [M, K], sorted by expert.
        weight: operand [E, N, K].
        offsets: [E + 1] int32.
        row_weight: [M] FP32 router weights, rounded where the format says; not for formats that weight the sum.
        bias: [N] BF16 of a dense layer, added before y is rounded; only for formats that fuse it.

    Returns:
        [M, N] BF16.
    """
    assert bias is None or (weight.dense and weight.format.fuses_bias), f"{weight.format.name} fuses no such bias"
    rounding = None if row_weight is None else weight.format.router_weight
    if weight.tensor_scale is not None:
        # A factor of the FP32 sum where it is alone, and part of the router weight where there is one.
        scale = rows_scale(weight.tensor_scale, offsets, len(rows.values))
        row_weight, rounding = (
            (scale, "on_accumulator") if row_weight is None else (row_weight * scale, "rounded_product")
        )
    if rows.scale is None:
        if weight.is_packed:
            return _multiply_packed(rows.values, weight, offsets, row_weight, rounding)
        return _multiply_bf16(rows.values, weight.values, offsets, row_weight, rounding, bias)
    assert weight.scale is not None
    operands = (rows.values, rows.scale, weight.values, weight.scale, offsets)
    if weight.format.activation_kind == "int8_token":
        return grouped_gemm_channel(*operands, row_weight=row_weight, channel_first=weight.channel_first, bias=bias)
    on_hopper = _fits_hopper(rows, weight)
    if weight.format.activation_kind == "fp8_token":
        assert row_weight is None
        multiply = hopper_grouped_gemm_fp8_channel if on_hopper else grouped_gemm_channel
        return multiply(*operands, channel_first=weight.channel_first, bias=bias)
    return (hopper_grouped_gemm_fp8_block if on_hopper else grouped_gemm_fp8_block)(*operands, row_weight=row_weight)


def swiglu_rows(hidden: Tensor, fmt: QuantFormat) -> QuantizedRows:
    """Run SwiGLU on fc1's output and quantize it for fc2, in one pass over memory.

    Args:
        hidden: [M, 2 I] BF16, gate columns before up columns.
        fmt: the format.

    Returns:
        fc2's input [M, I].
    """
    if fmt.activation_kind == "none":
        return QuantizedRows(swiglu(hidden), None)
    if fmt.activation_kind in TOKEN_DTYPES:
        return QuantizedRows(*swiglu_quantize_token(hidden, fmt.activation_kind))
    return QuantizedRows(*swiglu_quantize_group(hidden))


def _fits_hopper(rows: QuantizedRows, weight: GemmOperand) -> bool:
    # The specialised kernels exist for this compute capability only, and take whole tiles of weights.
    right_gpu = rows.values.is_cuda and torch.cuda.get_device_capability(rows.values.device) == HOPPER
    return right_gpu and not any(size % FP8_BLOCK for size in weight.values.shape[-2:])


def _multiply_bf16(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    rounding: str | None,
    bias: Tensor | None = None,
) -> Tensor:
    if len(weight) == 1 and row_weight is None:
        return torch.nn.functional.linear(x, weight[0], bias)
    assert bias is None
    return grouped_gemm_bf16(x, weight, offsets, row_weight=row_weight, weight_rounding=rounding)


def _multiply_packed(
    x: Tensor, weight: GemmOperand, offsets: Tensor, row_weight: Tensor | None, rounding: str | None
) -> Tensor:
    assert weight.scale is not None
    stored = weight.values, weight.scale
    num_bits, fp4 = weight.format.num_bits, weight.format.weight_kind == "nvfp4"
    few_rows = len(x) <= FUSED_INT4_MAX_ROWS * weight.values.shape[0]
    # Groups of NVFP4 have 16 columns, of which there may be an odd number.
    if num_bits == 4 and few_rows and x.shape[1] % COLUMN_MULTIPLE == 0:
        return grouped_gemm_int4(x, *stored, offsets, row_weight=row_weight, weight_rounding=rounding)
    values = nvfp4_unscaled(stored[0].view(torch.uint8), stored[1]) if fp4 else integer_dequantize(*stored, num_bits)
    return _multiply_bf16(x, values, offsets, row_weight, rounding)


def quantize_and_multiply(
    x: Tensor,
    weight: GemmOperand,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype,
    after_swiglu: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Quantize rows and multiply them; see `qarl_kernels.dispatch.grouped_gemm`.

    Args:
        x: [M, K] BF16.
        weight: operand [E, N, K].
        offsets: [E + 1] int32.
        out_dtype: BF16; a router weight that needs the FP32 accumulator is multiplied in the GEMM (`multiply_rows`).
        after_swiglu: x is a SwiGLU output.
        bias: see `multiply_rows`.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: another out_dtype.
    """
    if out_dtype != torch.bfloat16:
        raise ValueError(f"out_dtype={out_dtype}: the kernels return torch.bfloat16; pass row weights to multiply_rows")
    rows = quantize_rows(x, weight.format, after_swiglu=after_swiglu, dense=weight.dense)
    return multiply_rows(rows, weight, offsets, bias=bias)


def input_grad(grad_out: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return dX = dY @ W in BF16 for rows sorted by expert; see `qarl_kernels.dispatch.grouped_input_grad`."""
    if len(weight) == 1:
        return grad_out @ weight[0]
    return grouped_gemm_bf16(grad_out, weight, offsets, transposed=True)


def weight_grad(grad_out: Tensor, x: Tensor, offsets: Tensor, *, into: Weights | None = None) -> Weights:
    """Return dW = dY^T @ X of every expert; zero for an expert without rows.

    Args:
        grad_out: [M, N] BF16.
        x: [M, K] BF16.
        offsets: [E + 1] int32.
        into: BF16 or FP32 [E, N, K], or E tensors [N, K], to add the gradients to.

    Returns:
        [E, N, K] BF16, or `into`.
    """
    if into is not None:
        return grouped_wgrad(grad_out, x, offsets, out=into, accumulate=True)
    if len(offsets) == 2:
        return (grad_out.mT @ x).unsqueeze(0)
    return grouped_wgrad(grad_out, x, offsets)
