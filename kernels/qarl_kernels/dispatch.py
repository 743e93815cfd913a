"""Chooses between two implementations: Triton operators for BF16 on a Hopper GPU, the torch reference elsewhere.

Everything above this package calls these functions; nothing else asks for a device. The reference also serves a GPU
when activations are FP32 (experiments) or the GPU has no FP8 tensor cores and no bulk tensor copies (before Hopper).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from qarl_formats import QuantFormat
from qarl_kernels import gemm as reference
from qarl_kernels.expert_mlp import expert_mlp_reference
from qarl_kernels.gemm import GemmOperand
from qarl_kernels.low_rank import ExpertAdapters
from qarl_kernels.routing import route_rows
from qarl_kernels.weights import (
    QuantizedWeight,
    Weights,
    largest_reference,
    logical_shape,
    nonfinite_error,
    quantize_weight_reference,
    weight_problems,
)

_HOPPER = (9, 0)


def runs_kernels(x: Tensor) -> bool:
    """Return whether the Triton operators compute this: BF16 on a GPU of compute capability 9.0 or later."""
    return x.is_cuda and x.dtype == torch.bfloat16 and _is_hopper(x.device.index)


@cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= _HOPPER


def quantize_weight(
    weight: Weights, fmt: QuantFormat, *, name: str = "weight", amax: Tensor | None = None
) -> QuantizedWeight:
    """Quantize bf16(weight) into the tensors that are executed, stored and published.

    Args:
        weight: [..., N, K] float, or E tensors [N, K], which are read where they lie and give what their stack would;
            rounded to BF16 first, as the learner's model weights are.
        fmt: the format.
        name: what to call the weight in errors.
        amax: `largest` of all weights that share the scale of a `tensor_scaled` format; None: of this one.

    Returns:
        The stored form. On a GPU its NaN and Inf are counted, for `require_finite` to read.

    Raises:
        ValueError: the shape or dtype does not fit the format, or on a CPU the weight holds NaN or Inf (tensor and
            first index named).
    """
    _require_storable(weight, fmt, name, amax)
    weight = _detached(weight, torch.bfloat16)
    if runs_kernels(_first(weight)) and _has_quantizer(fmt):
        from qarl_kernels.ops.weights import quantize_weight_kernel

        with _called(name):
            return quantize_weight_kernel(weight, fmt, amax)
    return quantize_weight_reference(_stack(weight), fmt, name=name, amax=amax)


def _require_storable(weight: Weights, fmt: QuantFormat, name: str, amax: Tensor | None) -> None:
    given = [weight] if isinstance(weight, Tensor) else list(weight)
    if not given:
        raise ValueError(f"{name}: no weights to quantize; give a tensor [..., N, K], or at least one [N, K]")
    shape = logical_shape(weight)
    problems = weight_problems(shape, fmt)
    if others := sorted({tuple(one.shape) for one in given} - {tuple(given[0].shape)}):
        problems.append(f"some have other shapes: {', '.join(map(str, map(list, others)))}")
    if others := sorted({str(one.dtype) for one in given if not one.dtype.is_floating_point}):
        problems.append(f"is {', '.join(others)} (legal: floating-point numbers)")
    if amax is not None and tuple(amax.shape) != (legal := (*shape[:-2], 1)):
        problems.append(f"amax has shape {list(amax.shape)} (legal: {list(legal)}, one for each weight)")
    if problems:
        raise ValueError(f"{name} {list(shape)} cannot be stored as {fmt.name}: " + "; ".join(problems))


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Put a weight's name before what its kernels, which do not know it, say in an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def largest(weight: Weights) -> Tensor:
    """Return the largest magnitude of bf16(weight), from which the scale of a `tensor_scaled` format is made.

    Args:
        weight: [..., N, K] float, or E tensors [N, K].

    Returns:
        [..., 1] FP32, one for each weight [N, K].
    """
    weight = _detached(weight, torch.bfloat16)
    if runs_kernels(_first(weight)):
        from qarl_kernels.ops.nvfp4 import largest_magnitudes

        return largest_magnitudes(weight)
    return largest_reference(_stack(weight))


def _first(weight: Weights) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight[0]


def _stack(weight: Weights) -> Tensor:
    return weight if isinstance(weight, Tensor) else torch.stack(list(weight))


def _detached(weight: Weights, dtype: torch.dtype) -> Weights:
    if isinstance(weight, Tensor):
        return weight.detach().to(dtype)
    return [one.detach().to(dtype) for one in weight]


def quantize_with_operand(
    weight: Weights, fmt: QuantFormat, *, name: str = "weight", amax: Tensor | None = None
) -> tuple[QuantizedWeight, GemmOperand]:
    """Quantize a weight and prepare it for GEMMs with activations of its dtype; the kernels do both in one pass.

    Args:
        weight: [..., N, K] BF16 or FP32, or E tensors [N, K].
        fmt: the format.
        name: what to call the weight in errors.
        amax: see `quantize_weight`.

    Returns:
        The stored form, and the operand.

    Raises:
        ValueError: see `quantize_weight`.
    """
    first = _first(weight)
    if runs_kernels(first) and _has_quantizer(fmt):
        from qarl_kernels.ops import weights

        _require_storable(weight, fmt, name, amax)
        with _called(name):
            return weights.quantize_with_operand(_detached(weight, first.dtype), fmt, amax)
    quantized = quantize_weight(weight, fmt, name=name, amax=amax)
    return quantized, gemm_operand(quantized, first.dtype)


def _has_quantizer(fmt: QuantFormat) -> bool:
    return fmt.code_bits in (4, 8) if fmt.weight_kind == "int" else fmt.is_quantized


def require_finite(weights: Mapping[str, QuantizedWeight]) -> None:
    """Raise if a weight quantized on a GPU held NaN or Inf; reads the device once for all of them.

    Raises:
        ValueError: names every such weight and how many values were not finite.
    """
    counted = {name: weight.nonfinite for name, weight in weights.items() if weight.nonfinite is not None}
    if not counted:
        return
    counts = torch.stack([count.reshape(()) for count in counted.values()]).tolist()
    bad = [f"{name} ({count})" for name, count in zip(counted, counts, strict=True) if count]
    if bad:
        raise nonfinite_error(bad)


def gemm_operand(weight: QuantizedWeight, dtype: torch.dtype, *, packed: bool = False) -> GemmOperand:
    """Prepare a stored weight for GEMMs with activations of `dtype`.

    Args:
        weight: the stored form.
        dtype: BF16 or FP32.
        packed: let the kernels' GEMM unpack w4a16, w8a16 or nvfp4 itself; the reference unpacks all the same.

    Returns:
        The operand: 8-bit values and scales, or a BF16 weight; on a CPU FP32 holding the same values.
    """
    weight = weight.narrowed()
    stored = next(iter(weight.tensors.values()))
    if dtype == torch.bfloat16 and runs_kernels(stored.new_empty(0, dtype=dtype)):
        from qarl_kernels.ops.weights import operand_from_weight

        return operand_from_weight(weight, packed=packed)
    return GemmOperand.from_weight(weight, dtype)


def grouped_gemm(
    x: Tensor,
    weight: GemmOperand,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    after_swiglu: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply rows sorted by expert, each by its expert's weight: y = round(x_q @ W_q^T); experts may have no row.

    Args:
        x: [M, K] BF16 or FP32 rows, sorted by expert, not yet quantized.
        weight: operand [E, N, K].
        offsets: [E + 1] int32; expert e owns rows offsets[e] to offsets[e+1].
        out_dtype: dtype of the result; None = x's. FP32 returns the accumulator unrounded.
        after_swiglu: x is a SwiGLU output (fp8_block: the engine quantizes it with its fused kernel's floor).
        bias: [N] of a dense layer, rounded to x's dtype and added to y before y is rounded where the format fuses it,
            after that elsewhere.

    Returns:
        [M, N] in out_dtype.

    Raises:
        ValueError: a shape the kernels cannot take, with the legal ones.
    """
    if bias is not None:
        bias = bias.to(x.dtype)
        if not weight.format.fuses_bias:
            return grouped_gemm(x, weight, offsets, out_dtype=out_dtype, after_swiglu=after_swiglu) + bias
    multiply = reference.grouped_gemm
    if runs_kernels(x):
        from qarl_kernels.ops.operand_gemm import quantize_and_multiply as multiply
    return multiply(x, weight, offsets, out_dtype=out_dtype or x.dtype, after_swiglu=after_swiglu, bias=bias)


def backward_weight(weight: GemmOperand, dtype: torch.dtype) -> Tensor:
    """Return the weight that a GEMM multiplied by, for dX = dY @ W.

    Args:
        weight: operand [..., N, K].
        dtype: the result's dtype.

    Returns:
        [..., N, K].
    """
    if dtype == torch.bfloat16 and runs_kernels(weight.values.new_empty(0, dtype=dtype)):
        from qarl_kernels.ops.weights import dequantize_operand

        return dequantize_operand(weight)
    return weight.effective_weight().to(dtype)


def grouped_input_grad(grad_out: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return dX = dY @ W for rows sorted by expert.

    Args:
        grad_out: [M, N].
        weight: [E, N, K] of the same dtype.
        offsets: [E + 1] int32.

    Returns:
        [M, K] in grad_out's dtype.
    """
    if runs_kernels(grad_out):
        from qarl_kernels.ops.operand_gemm import input_grad

        return input_grad(grad_out, weight, offsets)
    return reference.grouped_input_grad(grad_out, weight, offsets)


def grouped_weight_grad(grad_out: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return dW = dY^T @ X of every expert; zero for an expert without rows.

    Args:
        grad_out: [M, N].
        x: [M, K], cast to grad_out's dtype.
        offsets: [E + 1] int32.

    Returns:
        [E, N, K] in grad_out's dtype.
    """
    if runs_kernels(grad_out):
        from qarl_kernels.ops.operand_gemm import weight_grad

        return weight_grad(grad_out, x.to(grad_out.dtype), offsets)
    return reference.grouped_weight_grad(grad_out, x, offsets)


def expert_mlp(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    fc1: GemmOperand,
    fc2: GemmOperand,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Run routed tokens through their experts, y = sum_k w_k fc2(SwiGLU(fc1(x))), in the engine's order of operations.

    Args:
        x: [T, H] BF16 or FP32.
        topk_index: [T, k] int64.
        topk_weight: [T, k] FP32 router weights.
        fc1: [E, 2 I, H], gate rows before up rows.
        fc2: [E, H, I].
        adapters: added beside both; None without.

    Returns:
        [T, H] in x's dtype.

    Raises:
        ValueError: a shape the kernels cannot take, with the legal ones.
    """
    num_experts = fc1.values.shape[0]
    if runs_kernels(x):
        from qarl_kernels.ops.adapted_mlp import adapted_mlp_forward
        from qarl_kernels.ops.mlp import expert_mlp_forward

        common = (x, route_rows(topk_index, num_experts), topk_weight.float(), fc1, fc2)
        return (expert_mlp_forward(*common) if adapters is None else adapted_mlp_forward(*common, adapters))[0]
    unscaled = fc2.unscaled()
    return expert_mlp_reference(
        x,
        topk_index,
        topk_weight,
        lambda rows, offsets, dtype: reference.grouped_gemm(rows, fc1, offsets, out_dtype=dtype),
        lambda rows, offsets, dtype: reference.grouped_gemm(
            rows, unscaled, offsets, out_dtype=dtype, after_swiglu=adapters is None
        ),
        fc1.format,
        num_experts,
        adapters,
        fc2_scale=fc2.tensor_scale,
    )
