"""GEMM per format with the rollout engine's rounding points, in torch: y = round(sum_k x * W^T).

`w*a16`, `bf16`: the products of bf16(code * scale), FP32 accumulation, one rounding to the activation dtype.
`w4a8`: activations to FP8 per token; y = round(channel_scale * (token_scale * acc)).
`fp8_channel`: activations to FP8 per token; y = round(token_scale * (channel_scale * acc)).
`fp8_block`: activations to FP8 per 1x128; per K-block acc += (a8 @ w8^T) * token_scale * block_scale in FP32.
`nvfp4`: the products of code * group scale, FP32 accumulation; y = round(acc / G), G the weight's global scale.
`int8`: activations to INT8 per token, sums of integers; y = round(channel_scale * (token_scale * acc)) in experts, the
other way round in dense layers.

Where a format fuses the bias of a dense layer, y = round(fma(token_scale, channel_scale * acc, bias)), or
round(acc + bias) in `bf16`.

Activations may be BF16 (the engine's dtype) or FP32 (CPU experiments); rounding is to the activation dtype.
Shape letters: M rows, N out-features, K in-features, E experts.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import assert_never

import torch
from torch import Tensor

from qarl_formats import FP8_BLOCK, QuantFormat
from qarl_kernels import fp8, int8, nvfp4
from qarl_kernels.weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class GemmOperand:
    """A quantized weight in the form that the GEMM multiplies, like the weights an engine repacks for its kernels.

    Attributes:
        format: the format.
        values: [..., N, K] in the compute dtype (16-bit activations), or E4M3 values or INT8 codes, which the
            reference holds in FP32; for GEMMs that unpack them, int32 words [..., N, K * num_bits / 32].
        scale: [..., N, 1] channel scales, [..., ceil(N/128), K/128] block scales, packed values' group scales, or None.
        tensor_scale: [..., 1, 1] FP32 factor of a whole weight, multiplied by the FP32 sum (nvfp4), or None.
    """

    format: QuantFormat
    values: Tensor
    scale: Tensor | None
    _dense: bool | None = None
    tensor_scale: Tensor | None = None

    @classmethod
    def from_weight(cls, weight: QuantizedWeight, dtype: torch.dtype) -> "GemmOperand":
        """Prepare a stored weight for activations of `dtype`."""
        weight = weight.narrowed()
        fmt = weight.format
        match fmt.weight_kind:
            case "int" if fmt.activation_kind == "fp8_token":
                values, scale = fp8.encode_int4_as_fp8(weight.codes(), weight.tensors["weight_scale"])
                return cls(fmt, values.float(), scale)
            case "nvfp4":
                values = nvfp4.unscaled(weight.tensors["weight_packed"], weight.tensors["weight_scale"])
                factor = nvfp4.tensor_scale(weight.tensors["weight_global_scale"])
                return cls(fmt, values.to(dtype), None, tensor_scale=factor)
            case "int8_rows" | "fp8_rows":
                return cls(fmt, weight.tensors["weight"].float(), weight.tensors["weight_scale"])
            case "fp8_blocks":
                return cls(fmt, weight.tensors["weight"].float(), weight.tensors["weight_scale_inv"])
            case "int" | "plain":
                return cls(fmt, weight.dequantize().to(dtype), None)
            case unknown:
                assert_never(unknown)

    @property
    def dense(self) -> bool:
        """Whether it is a dense layer's weight, stacked or not, and not that of routed experts: the engine's kernel."""
        return self.values.ndim == 2 if self._dense is None else self._dense

    @property
    def channel_first(self) -> bool:
        """Whether channel scales are multiplied before token scales, which differs in the last bit."""
        match self.format.weight_kind:
            case "fp8_rows":
                return True
            case "int8_rows":
                return self.dense
            case "int" | "nvfp4" | "fp8_blocks" | "plain":
                return False
            case unknown:
                assert_never(unknown)

    @property
    def is_packed(self) -> bool:
        """Whether the GEMM itself unpacks the stored tensors."""
        return self.values.dtype == torch.int32

    def effective_weight(self) -> Tensor:
        """Return the weight this GEMM multiplies by, [..., N, K]: BF16 or FP32 without scales, FP32 otherwise."""
        if self.tensor_scale is not None:
            return self.values.float() * self.tensor_scale
        if self.scale is None:
            return self.values
        values = self.values.float()
        if self.format.weight_kind == "fp8_blocks":
            return values * fp8.expand_block_scale(self.scale, *self.values.shape[-2:])
        return values * self.scale

    def expert(self, index: int) -> "GemmOperand":
        """Return one expert of a stacked operand."""
        return self._indexed(index)

    def stacked(self) -> "GemmOperand":
        """Return a dense operand as a stack of one expert."""
        return self._indexed(None)

    def _indexed(self, index: int | None) -> "GemmOperand":
        scale, tensor_scale = (None if one is None else one[index] for one in (self.scale, self.tensor_scale))
        return GemmOperand(self.format, self.values[index], scale, self.dense, tensor_scale)

    def unscaled(self) -> "GemmOperand":
        """Return the operand without its `tensor_scale`, for those who multiply it into router weights."""
        return replace(self, tensor_scale=None)


def gemm(
    x: Tensor,
    weight: GemmOperand,
    *,
    out_dtype: torch.dtype | None = None,
    after_swiglu: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply activations by one quantized weight: y = round(x_q @ W_q^T).

    Args:
        x: [M, K] BF16 or FP32 activations, not yet quantized.
        weight: operand [N, K].
        out_dtype: dtype of the result; None = x's. FP32 returns the accumulator unrounded.
        after_swiglu: x is a SwiGLU output (fp8_block: the engine quantizes it with its fused kernel's floor).
        bias: [N] in x's dtype, added before the result is rounded, of a dense layer in a format that fuses it.

    Returns:
        [M, N] in out_dtype.
    """
    assert bias is None or (weight.dense and weight.format.fuses_bias), f"{weight.format.name} fuses no such bias"
    out_dtype = x.dtype if out_dtype is None else out_dtype
    match weight.format.activation_kind:
        case "none":
            return _product(x, weight, out_dtype, bias)
        case "fp8_token":
            a8, token_scale = fp8.quantize_token(x)
            return _rescaled(a8.float() @ weight.values.mT, token_scale, weight, bias).to(out_dtype)
        case "int8_token":
            a8, token_scale = int8.quantize_token(x, dense=weight.dense)
            return _rescaled(int8.exact_product(a8.float(), weight.values), token_scale, weight, bias).to(out_dtype)
        case "fp8_group":
            return _group_product(x, weight, after_swiglu=after_swiglu).to(out_dtype)
        case unknown:
            assert_never(unknown)


def _product(x: Tensor, weight: GemmOperand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if weight.tensor_scale is not None:
        sums = gemm(x, weight.unscaled(), out_dtype=torch.promote_types(x.dtype, torch.float32))
        return (sums * weight.tensor_scale.view(1)).to(out_dtype)
    dtype = x.dtype if out_dtype == x.dtype else torch.float32
    bias = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.values.to(dtype), bias).to(out_dtype)


def _rescaled(accumulator: Tensor, token_scale: Tensor, weight: GemmOperand, bias: Tensor | None) -> Tensor:
    assert weight.scale is not None
    if weight.channel_first:
        return _scale_and_add(token_scale, weight.scale.mT * accumulator, bias)
    return weight.scale.mT * (token_scale * accumulator)


def _group_product(x: Tensor, weight: GemmOperand, *, after_swiglu: bool) -> Tensor:
    assert weight.scale is not None
    a8, group_scale = fp8.quantize_group(x, after_swiglu=after_swiglu)
    row_scale = weight.scale.repeat_interleave(FP8_BLOCK, 0)[: weight.values.shape[0]]
    blocks = zip(a8.float().split(FP8_BLOCK, -1), weight.values.split(FP8_BLOCK, -1), strict=True)
    accumulator = torch.zeros(x.shape[0], weight.values.shape[0], dtype=torch.float32, device=x.device)
    for block, (a_block, w_block) in enumerate(blocks):
        accumulator += (a_block @ w_block.mT) * group_scale[:, block, None] * row_scale[None, :, block]
    return accumulator


def _scale_and_add(token_scale: Tensor, product: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return token_scale * product
    # The engine fuses both. In float64 a product of two FP32 numbers is exact, so only the sum rounds.
    return (token_scale.double() * product.double() + bias.double()).float()


def grouped_gemm(
    x: Tensor,
    weight: GemmOperand,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    after_swiglu: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply rows sorted by expert, each by its expert's weight; see `qarl_kernels.dispatch.grouped_gemm`.

    Args:
        x: [M, K].
        weight: operand [E, N, K].
        offsets: [E + 1].
        out_dtype: None = x's.
        after_swiglu: x is a SwiGLU output.
        bias: see `gemm`.

    Returns:
        [M, N] in out_dtype.
    """
    bounds = _bounds(offsets, len(x))
    out = x.new_empty(x.shape[0], weight.values.shape[-2], dtype=x.dtype if out_dtype is None else out_dtype)
    for index, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            rows, expert = x[start:stop], weight.expert(index)
            out[start:stop] = gemm(rows, expert, out_dtype=out_dtype, after_swiglu=after_swiglu, bias=bias)
    return out


def grouped_input_grad(grad_out: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return dX = dY @ W for rows sorted by expert; see `qarl_kernels.dispatch.grouped_input_grad`."""
    grad = grad_out.new_empty(len(grad_out), weight.shape[-1])
    for index, (start, stop) in enumerate(pairwise(_bounds(offsets, len(grad_out)))):
        grad[start:stop] = grad_out[start:stop] @ weight[index]
    return grad


def _bounds(offsets: Tensor, num_rows: int) -> list[int]:
    # Rows of no expert would never be written.
    bounds = offsets.tolist()
    assert (bounds[0], bounds[-1]) == (0, num_rows), (
        f"{num_rows} rows, but the experts have {bounds[0]} to {bounds[-1]}"
    )
    return bounds


def grouped_weight_grad(grad_out: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return dW = dY^T @ X of every expert; see `qarl_kernels.dispatch.grouped_weight_grad`."""
    bounds = list(pairwise(offsets.tolist()))
    return torch.stack([grad_out[start:stop].mT @ x[start:stop].to(grad_out.dtype) for start, stop in bounds])
