"""NVFP4 weights: BF16 [E, N, K] -> packed codes [E, N, K / 2], E4M3 scales [E, N, K / 16], and back.

Exactly as `nvfp4.quantize`, `nvfp4.pack` and `nvfp4.unscaled`. A weight's largest magnitude decides its global scale,
so weights are read twice: once by `largest_magnitudes`, once to be quantized. In memory the packed bytes of eight
columns are the int32 word that `int4.py` has for eight int4 codes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.nvfp4 import FP4_MAX, GROUP, LEAST_SCALE, OVERFLOW
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import divide
from qarl_kernels.ops.fp8_kernels import LARGE, SMALL
from qarl_kernels.ops.stacks import Weights, address_table, device_problems, expert_weights, stack_shape

_FP4_MAX = tl.constexpr(FP4_MAX)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_OVERFLOW = tl.constexpr(OVERFLOW)
_GROUP = tl.constexpr(GROUP)
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
_EXPONENT_BITS = tl.constexpr(0x7F800000)
# Between the exponents of FP32 and of a code.
_BIAS = tl.constexpr(2.0**126)
# Groups of one program, the fastest on an H200: `tools/bench/kernels/quantize_bandwidth.py`.
_LARGEST_TILE, _QUANTIZE_TILE, _UNSCALED_TILE = 1024, 128, 256


@dataclass(frozen=True, slots=True)
class Nvfp4Weights:
    """Quantized expert weights; without the expert dimension where the weight was one tensor [N, K].

    Attributes:
        packed: [E, N, K / 2] uint8.
        scale: [E, N, K / 16] float8_e4m3fn.
        nonfinite: [1] int32 on the device, the number of groups that hold NaN, Inf or magnitudes of 2^20 and more.
        unscaled: [E, N, K] BF16, code * scale, if asked for.
    """

    packed: Tensor
    scale: Tensor
    nonfinite: Tensor
    unscaled: Tensor | None = None


@triton.jit
def _groups(program, num_groups, TILE: tl.constexpr):
    """Offsets of a tile's groups' weights [TILE, 16], and which of the groups exist."""
    group = program.to(tl.int64) * TILE + tl.arange(0, TILE)
    return group, group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :], group < num_groups


@triton.jit
def _largest_kernel(table_ptr, bits_ptr, num_groups, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)
    weights_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(tl.bfloat16))
    weights_ptr = tl.multiple_of(weights_ptr, ALIGNMENT)
    _, offsets, valid = _groups(tl.program_id(0), num_groups, TILE)
    weights = tl.load(weights_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
    # Compared as integers, NaN and Inf are the largest.
    bits = tl.max(tl.max(weights.to(tl.int32, bitcast=True) & _ABS_BITS, 1), 0)
    tl.atomic_max(bits_ptr + expert, bits, sem="relaxed")


@triton.jit
def _round_to_grid(size):
    """Index of |w / scale| among 0, .5, 1, 1.5, 2, 3, 4, 6, and the number there; a tie goes to the even index.

    They are half a power of two apart: of 1 below 2, of 2 from there and of 4 from there. Added to 2^22 times that
    power, a number is rounded to such halves.
    """
    size = tl.minimum(size, _FP4_MAX)
    power = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & _EXPONENT_BITS
    added = power + (22 << 23)
    rounded = size + added.to(tl.float32, bitcast=True)
    halves = rounded.to(tl.int32, bitcast=True) - added
    return halves + (power >> 22) - 2 * 127, rounded - added.to(tl.float32, bitcast=True)


@triton.jit
def grid_values(codes):
    """FP32 values of int32 codes, sign << 3 | index; an index is an exponent of two bits and a fraction of one."""
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _BIAS


@triton.jit
def _quantize_kernel(
    table_ptr,  # [E] addresses of BF16 [N, K]
    divisor_ptr,  # [E]
    words_ptr,  # [E, N, K / 8]
    scale_ptr,  # [E, N, K / 16]
    unscaled_ptr,  # [E, N, K]
    nonfinite_ptr,  # [1]
    num_groups,
    TILE: tl.constexpr,
    EMIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    weights_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(tl.bfloat16))
    weights_ptr = tl.multiple_of(weights_ptr, ALIGNMENT)
    divisor = tl.load(divisor_ptr + expert)
    group, offsets, valid = _groups(tl.program_id(0), num_groups, TILE)
    start = expert * num_groups
    weights = tl.load(weights_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
    amax = tl.max(weights.to(tl.int32, bitcast=True) & _ABS_BITS, 1).to(tl.float32, bitcast=True)
    rounded = (divisor * tl.math.div_rn(amax, _FP4_MAX)).to(tl.float8e4nv).to(tl.float32)
    scale = tl.maximum(rounded, _LEAST_SCALE)
    step = tl.math.div_rn(scale, divisor)
    # Exact, and the reciprocal of a step below 2^-64 cannot overflow.
    factor = tl.where(step < SMALL, LARGE, 1.0)
    index, size = _round_to_grid(divide(tl.abs(weights) * factor[:, None], (step * factor)[:, None]))
    codes = index | tl.where(weights < 0.0, 8, 0)
    lanes = tl.reshape(codes, TILE, _GROUP // 8, 8) << (4 * tl.arange(0, 8))[None, None, :]
    word = group[:, None] * (_GROUP // 8) + tl.arange(0, _GROUP // 8)[None, :]
    tl.store(words_ptr + start * (_GROUP // 8) + word, tl.sum(lanes, 2), mask=valid[:, None])
    tl.store(scale_ptr + start + group, scale.to(tl.float8e4nv), mask=valid)
    if EMIT:
        # Triton's -x is the subtraction 0 - x, which loses the sign of 0.
        values = (tl.where(weights < 0.0, size * -1.0, size) * scale[:, None]).to(tl.bfloat16)
        tl.store(unscaled_ptr + start * _GROUP + offsets, values, mask=valid[:, None])
    bad = valid & ~(amax < _OVERFLOW)
    tl.atomic_add(nonfinite_ptr + group * 0, 1, mask=bad, sem="relaxed")


@triton.jit
def _unscaled_kernel(words_ptr, scale_ptr, values_ptr, num_groups, TILE: tl.constexpr):
    group, offsets, valid = _groups(tl.program_id(0), num_groups, TILE)
    lane = tl.arange(0, _GROUP)[None, :]
    words = tl.load(words_ptr + group[:, None] * (_GROUP // 8) + lane // 8, mask=valid[:, None], other=0)
    scale = tl.load(scale_ptr + group, mask=valid, other=0.0).to(tl.float32)
    values = grid_values((words >> (4 * (lane % 8))) & 15) * scale[:, None]
    tl.store(values_ptr + offsets, values.to(tl.bfloat16), mask=valid[:, None])


def largest_magnitudes(weights: Weights) -> Tensor:
    """Return the largest magnitude of each weight, NaN if it holds one.

    Args:
        weights: BF16 [N, K], [E, N, K] with any stride between experts, or E tensors [N, K]; each expert contiguous, K
            a multiple of 16.

    Returns:
        [E, 1] FP32, or [1] for one tensor [N, K].

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `weights.largest_reference`.
    """
    tensors, stacked = expert_weights("nvfp4 largest_magnitudes", weights, GROUP)
    with torch.no_grad():
        bits = torch.ops.qarl.largest_magnitudes(tensors)
    return bits.view(torch.float32).view(-1, 1) if stacked else bits.view(torch.float32)


@torch.library.custom_op("qarl::largest_magnitudes", mutates_args=())
def _largest_magnitudes(weights: list[Tensor]) -> Tensor:
    experts, rows, columns = stack_shape(weights)
    bits = torch.zeros(experts, dtype=torch.int32, device=weights[0].device)
    groups = rows * columns // GROUP
    with torch.cuda.device_of(weights[0]):
        table, alignment = address_table(weights)
        grid = triton.cdiv(groups, _LARGEST_TILE), experts
        _largest_kernel[grid](table, bits, groups, TILE=_LARGEST_TILE, ALIGNMENT=alignment)
    return bits


@_largest_magnitudes.register_fake
def _(weights: list[Tensor]) -> Tensor:
    return torch.empty(stack_shape(weights)[0], dtype=torch.int32, device=weights[0].device)


def nvfp4_quantize(weights: Weights, divisor: Tensor, *, emit_unscaled: bool = False) -> Nvfp4Weights:
    """Quantize to NVFP4 along K, with each weight's global scale given.

    Args:
        weights: as `largest_magnitudes`.
        divisor: [E, 1] or [1] FP32, `nvfp4.global_divisor`.
        emit_unscaled: also write code * scale in the same pass.

    Returns:
        The quantized weights. NaN and Inf are counted on the device; nothing waits for the count.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `nvfp4.quantize`, `nvfp4.pack`, `nvfp4.unscaled`.
    """
    tensors, stacked = expert_weights("nvfp4_quantize", weights, GROUP)
    experts = stack_shape(tensors)[0]
    problems = tensor_problems("divisor", divisor, (torch.float32,), divisor.ndim)
    if divisor.numel() != experts:
        problems.append(f"divisor has shape {list(divisor.shape)} (legal: [{experts}, 1], one for each weight)")
    refuse("nvfp4_quantize", problems)
    with torch.no_grad():
        results = torch.ops.qarl.nvfp4_quantize(tensors, divisor, emit_unscaled)
    packed, scale, *extra = results[:-1] if stacked else [result[0] for result in results[:-1]]
    return Nvfp4Weights(packed.view(torch.uint8), scale, results[-1], *extra)


def _empty_results(weights: list[Tensor], emit_unscaled: bool) -> list[Tensor]:
    experts, rows, columns = stack_shape(weights)
    layout = [(columns // 8, torch.int32), (columns // GROUP, torch.float8_e4m3fn)]
    layout += [(columns, torch.bfloat16)] if emit_unscaled else []
    device = weights[0].device
    results = [torch.empty(experts, rows, width, dtype=dtype, device=device) for width, dtype in layout]
    return [*results, torch.zeros(1, dtype=torch.int32, device=device)]


@torch.library.custom_op("qarl::nvfp4_quantize", mutates_args=())
def _nvfp4_quantize(weights: list[Tensor], divisor: Tensor, emit_unscaled: bool) -> list[Tensor]:
    results = _empty_results(weights, emit_unscaled)
    words, scale, *extra, nonfinite = results
    experts, rows, columns = stack_shape(weights)
    groups = rows * columns // GROUP
    with torch.cuda.device_of(weights[0]):
        table, alignment = address_table(weights)
        _quantize_kernel[triton.cdiv(groups, _QUANTIZE_TILE), experts](
            table, divisor, words, scale, extra[0] if extra else words, nonfinite, groups, TILE=_QUANTIZE_TILE,
            EMIT=emit_unscaled, ALIGNMENT=alignment,
        )  # fmt: skip
    return results


@_nvfp4_quantize.register_fake
def _(weights: list[Tensor], divisor: Tensor, emit_unscaled: bool) -> list[Tensor]:  # noqa: ARG001
    return _empty_results(weights, emit_unscaled)


def nvfp4_unscaled(packed: Tensor, scale: Tensor) -> Tensor:
    """Return code * scale, the weight that NVFP4's GEMMs multiply by before its global scale.

    Args:
        packed: [..., N, K / 2] uint8, contiguous.
        scale: [..., N, K / 16] float8_e4m3fn, contiguous.

    Returns:
        [..., N, K] BF16.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `nvfp4.unscaled`.
    """
    problems = device_problems([packed, scale])
    if (packed.dtype, scale.dtype) != (torch.uint8, torch.float8_e4m3fn):
        problems.append(f"packed is {packed.dtype} and scale {scale.dtype} (legal: torch.uint8, torch.float8_e4m3fn)")
    if not (packed.is_contiguous() and scale.is_contiguous()):
        problems.append(f"strides {packed.stride()} and {scale.stride()} (legal: packed and scale contiguous)")
    if not packed.numel() or packed.ndim < 2 or packed.shape != (*scale.shape[:-1], scale.shape[-1] * GROUP // 2):
        problems.append(
            f"scale is {list(scale.shape)} for packed {list(packed.shape)} "
            "(legal: [..., N, K / 2] and [..., N, K / 16])"
        )
    refuse("nvfp4_unscaled", problems)
    with torch.no_grad():
        return torch.ops.qarl.nvfp4_unscaled(packed, scale)


@torch.library.custom_op("qarl::nvfp4_unscaled", mutates_args=())
def _nvfp4_unscaled(packed: Tensor, scale: Tensor) -> Tensor:
    values = packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.bfloat16)
    with torch.cuda.device_of(packed):
        grid = (triton.cdiv(scale.numel(), _UNSCALED_TILE),)
        _unscaled_kernel[grid](packed.view(torch.int32), scale, values, scale.numel(), TILE=_UNSCALED_TILE)
    return values


@_nvfp4_unscaled.register_fake
def _(packed: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG001
    return packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.bfloat16)
