"""NVFP4 weights: BF16 [E, N, K] -> packed codes [E, N, K / 2], E4M3 scales [E, N, K / 16], and back.

Exactly as `nvfp4.quantize`, `nvfp4.pack` and `nvfp4.unscaled`. A weight's largest magnitude decides its global scale,
so weights are read twice: once by `largest_magnitudes`, once to be quantized. In memory the packed bytes of eight
columns are the int32 word that `integer_weights.py` has for eight int4 codes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.nvfp4 import FP4_MAX, GROUP, LEAST_SCALE, OVERFLOW
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.exact_math import divide, reciprocal
from qarl_kernels.ops.integer_kernels import _hide_order
from qarl_kernels.ops.stacks import address_table, device_problems, expert_weights, stack_shape
from qarl_kernels.weights import Weights

_FP4_MAX = tl.constexpr(FP4_MAX)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_OVERFLOW = tl.constexpr(OVERFLOW)
_GROUP = tl.constexpr(GROUP)
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
# Steps times this are normal numbers and have normal reciprocals.
_LIFT = tl.constexpr(2.0**16)
# The float that index 0 becomes, its bits, and what those of eight of them add to a word, modulo 2^32 and signed.
_ZERO = tl.constexpr(2.0**23 - 2)
_ZERO_BITS = tl.constexpr(0x4AFFFFFC)
_PACK_BIAS = tl.constexpr((sum(0x4AFFFFFC << lane for lane in range(0, 32, 4)) + 2**31) % 2**32 - 2**31)
# Between the exponents of FP32 and of a code.
_BIAS = tl.constexpr(2.0**126)
# Groups of one program, the fastest on an H200; the quantizer has changed since.
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
def _reciprocal(step):
    """1 / (_LIFT * step) as FP32 high + low, too large by less than 2^-34 of it.

    FP32 rounds w * (high + low) as it rounds w / step, as far as codes show it: no quotient of a BF16 w is nearer than
    2^-33 of itself below a point where its rounding decides the code. Tested over all significands.
    """
    step *= _LIFT
    estimate = reciprocal(step).to(tl.int32, bitcast=True)
    # It is at most 2 units in the last place off, so high is too small and low more than what is missing. With the 16
    # bits of high the product of a BF16 number is exact.
    high = ((estimate - 4) & -256).to(tl.float32, bitcast=True)
    return high, tl.fma(high * -1.0, step, 1.0) * (estimate + 8).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_grid(sizes, high, low):
    """Index of sizes / step among 0, .5, 1, 1.5, 2, 3, 4, 6, added to the bits of _ZERO; a tie goes to the even index.

    Added to _ZERO, a quotient is rounded to multiples of 1/2 below 2 and of 1 from there on, because floats are so far
    apart below and above 2^23. From 4 on, half of it is rounded to multiples of 1.
    """
    quotients = tl.fma(sizes, low, sizes * high)
    below_four = tl.fma(quotients, _LIFT, _ZERO).to(tl.int32, bitcast=True)
    from_four = tl.fma(quotients, _LIFT / 2, _ZERO + 2.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(below_four, from_four), _ZERO_BITS + 7)


@triton.jit
def _pack_codes(index, negative):
    """Words of eight codes, sign << 3 | index, from indices as `_round_to_grid` returns them."""
    lane = 4 * tl.arange(0, 8)[None, None, :]
    # Signs are joined before indices are known: a thread has seven predicates to keep comparisons in.
    signs = tl.sum(tl.where(negative, 8, 0) << lane, 2)
    return tl.sub(tl.sum(index << lane, 2) + signs, _PACK_BIAS, sanitize_overflow=False)


@triton.jit
def _grid_numbers(index, negative):
    """FP32 numbers of indices as `_round_to_grid` returns them."""
    halves = index.to(tl.float32, bitcast=True) - _ZERO
    # The last index stands for 6, not for 5.
    size = tl.maximum(halves, halves * 2.0 - 4.0)
    # Triton's -x is the subtraction 0 - x, which loses the sign of 0.
    return tl.where(negative, size * -1.0, size)


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
    first = tl.program_id(0) * TILE
    group = tl.arange(0, TILE)[None, :]
    valid = group < num_groups - first
    # Neighbouring threads hold the two words of a group and the first writes its scale: nothing is moved between them.
    word = tl.arange(0, 2)[:, None]
    words = group * 2 + word
    hidden = _hide_order(words, num_groups)
    offsets = words[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    start = first.to(tl.int64)
    out = expert * num_groups + start
    weights = tl.load(weights_ptr + start * _GROUP + offsets, mask=valid[:, :, None], other=0.0).to(tl.float32)
    sizes, negative = tl.abs(weights), weights < 0.0
    amax = tl.max(tl.max(sizes.to(tl.int32, bitcast=True), 2), 0).to(tl.float32, bitcast=True)[None, :]
    rounded = (divisor * divide(amax, _FP4_MAX)).to(tl.float8e4nv).to(tl.float32)
    scale = tl.maximum(rounded, _LEAST_SCALE)
    high, low = _reciprocal(tl.math.div_rn(scale, divisor))
    index = _round_to_grid(sizes, high[:, :, None], low[:, :, None])
    tl.store(words_ptr + out * 2 + hidden, _pack_codes(index, negative), mask=valid)
    groups, once = hidden >> 1, valid & (word == 0)
    tl.store(scale_ptr + out + groups, scale.to(tl.float8e4nv), mask=once)
    if EMIT:
        values = (_grid_numbers(index, negative) * scale[:, :, None]).to(tl.bfloat16)
        tl.store(unscaled_ptr + out * _GROUP + offsets, values, mask=valid[:, :, None])
    tl.atomic_add(nonfinite_ptr + groups * 0, 1, mask=once & ~(amax < _OVERFLOW), sem="relaxed")


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
