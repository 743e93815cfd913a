"""Integer weights in one pass over memory: BF16 [E, N, K] -> codes of 4 or 8 bits in int32 words, and BF16 scales.

For each group of 32, 64 or 128 weights along K, exactly as `integer.quantize_integer` and `integer.pack_int32`:
    scale = max(bf16(amax / divisor), 2^-126), code = clamp(round(w / scale)),
    word = sum_lane (code + 2^(bits-1)) << bits lane
and in the same pass, on request, the BF16 weight bf16(code * scale) or, of int4, `fp8.encode_int4_as_fp8`: fp8(code *
s8) and a channel scale. The FP8 encoding needs a row's largest scale before it writes the row and therefore keeps rows
in registers, which limits K. Codes may be kept to a grid of fewer bits; only its divisor and its largest code differ.
Where codes are nested, the BF16 weight is that of the codes that engines round them to, as `nested.narrow_tensor` does.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
from torch import Tensor

from qarl_formats import SCALE_CONVENTIONS, ScaleConvention
from qarl_kernels.integer import integer_grid
from qarl_kernels.ops.checks import refuse
from qarl_kernels.ops.integer_kernels import (
    _dequantize_kernel,
    _int4_encode_fp8_kernel,
    _quantize_encode_kernel,
    _quantize_pack_kernel,
)
from qarl_kernels.ops.stacks import address_table, device_problems, expert_weights, row_tile, stack_shape
from qarl_kernels.weights import Weights

Emit = Literal["packed", "bf16", "fp8"]

GROUP_SIZES = (32, 64, 128)
CODE_BITS = (4, 8)
EMITS = get_args(Emit)
FP8_GROUP_SIZE = 128
MAX_COLUMNS = 32768
_ENCODED_GROUPS = 32  # that one program of int4_encode_fp8 takes
_TILE_WEIGHTS = 4096


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """Quantized expert weights; without the expert dimension where the weight was one tensor [N, K].

    Attributes:
        packed: [E, N, K * num_bits / 32] int32, compressed-tensors' `pack-quantized`.
        scale: [E, N, K / group_size] BF16.
        nonfinite: [1] int32 on the device, the number of groups that hold NaN or Inf and so have meaningless codes.
        dequantized: [E, N, K] BF16, bf16(code * scale), narrowed where codes are nested, with emit="bf16".
        w8: [E, N, K] float8_e4m3fn, with emit="fp8".
        channel_scale: [E, N, 1] FP32, with emit="fp8".
    """

    packed: Tensor
    scale: Tensor
    nonfinite: Tensor
    dequantized: Tensor | None = None
    w8: Tensor | None = None
    channel_scale: Tensor | None = None


def integer_quantize_pack(
    weights: Weights,
    group_size: int,
    scale_convention: ScaleConvention,
    *,
    num_bits: int = 4,
    grid_bits: int | None = None,
    served_bits: int | None = None,
    emit: Emit = "packed",
) -> IntegerWeights:
    """Quantize along K and pack: scale = max(bf16(amax / divisor), 2^-126), code = clamp(round(w / scale)).

    Args:
        weights: BF16 [N, K], [E, N, K] with any stride between experts, or E tensors [N, K]; each expert contiguous.
        group_size: weights per scale, 32, 64 or 128.
        scale_convention: the grid, `narrow_range`, `full_range` or `clipped_range`.
        num_bits: bits that a code is stored in, 4 or 8.
        grid_bits: bits of the grid that codes lie on, 2 to num_bits; None = num_bits.
        served_bits: bits of the grid that nested codes are rounded to for the dequantized weight, 2 to grid_bits; None
            = grid_bits, and nothing is rounded.
        emit: what the same pass writes besides: nothing, the dequantized BF16 weight, or its FP8 encoding.

    Returns:
        The quantized weights. NaN and Inf are counted on the device; nothing waits for the count.

    Raises:
        ValueError: an argument, shape, dtype or device is not legal; everything wrong is named.

    Source: `integer.quantize_integer`, `integer.pack_int32`, `integer.dequantize_integer`, `fp8.encode_int4_as_fp8`,
    `nested.narrow_tensor`.
    """
    grid_bits = num_bits if grid_bits is None else grid_bits
    bits = num_bits, grid_bits, grid_bits if served_bits is None else served_bits
    refuse("integer_quantize_pack", _setting_problems(group_size, scale_convention, bits, emit))
    max_columns = MAX_COLUMNS if emit == "fp8" else None
    tensors, stacked = expert_weights("integer_quantize_pack", weights, group_size, max_columns)
    with torch.no_grad():
        results = torch.ops.qarl.integer_quantize_pack(tensors, group_size, scale_convention, *bits, emit)
    packed, scale, *extra = results[:-1] if stacked else [result[0] for result in results[:-1]]
    names = {"packed": (), "bf16": ("dequantized",), "fp8": ("w8", "channel_scale")}[emit]
    return IntegerWeights(packed, scale, results[-1], **dict(zip(names, extra, strict=True)))


def _setting_problems(group_size: int, scale_convention: str, bits: tuple[int, int, int], emit: str) -> list[str]:
    (num_bits, grid_bits, served_bits), problems = bits, []
    if group_size not in GROUP_SIZES:
        problems.append(f"group_size={group_size} (legal: 32, 64, 128)")
    if scale_convention not in SCALE_CONVENTIONS:
        problems.append(f"scale_convention={scale_convention!r} (legal: {', '.join(SCALE_CONVENTIONS)})")
    if num_bits not in CODE_BITS:
        problems.append(f"num_bits={num_bits} (legal: 4, 8)")
    if not 2 <= served_bits <= grid_bits <= num_bits:
        problems.append(
            f"grid_bits={grid_bits} and served_bits={served_bits} (legal: 2 <= served <= grid <= {num_bits})"
        )
    if emit not in EMITS:
        problems.append(f"emit={emit!r} (legal: {', '.join(EMITS)})")
    if emit == "fp8" and group_size != FP8_GROUP_SIZE:
        problems.append(f"group_size={group_size} with emit='fp8' (legal: {FP8_GROUP_SIZE})")
    if emit == "fp8" and (num_bits, served_bits) != (4, grid_bits):
        problems.append(f"num_bits={num_bits} and served_bits={served_bits} with emit='fp8' (legal: 4, None)")
    return problems


def _empty_results(tensors: list[Tensor], group_size: int, num_bits: int, emit: str) -> list[Tensor]:
    experts, rows, columns = stack_shape(tensors)
    layout = [(columns * num_bits // 32, torch.int32), (columns // group_size, torch.bfloat16)]
    layout += {
        "packed": [],
        "bf16": [(columns, torch.bfloat16)],
        "fp8": [(columns, torch.float8_e4m3fn), (1, torch.float32)],
    }[emit]
    device = tensors[0].device
    results = [torch.empty(experts, rows, width, dtype=dtype, device=device) for width, dtype in layout]
    return [*results, torch.zeros(1, dtype=torch.int32, device=device)]


@torch.library.custom_op("qarl::integer_quantize_pack", mutates_args=())
def _integer_quantize_pack(
    weights: list[Tensor],
    group_size: int,
    scale_convention: str,
    num_bits: int,
    grid_bits: int,
    served_bits: int,
    emit: str,
) -> list[Tensor]:
    results = _empty_results(weights, group_size, num_bits, emit)
    experts, rows, columns = stack_shape(weights)
    with torch.cuda.device_of(weights[0]):
        table, alignment = address_table(weights)
        _, code_max, divisor = integer_grid(grid_bits, scale_convention)
        grid = {"INVERSE_DIVISOR": 1 / divisor, "CODE_MAX": code_max, "ALIGNMENT": alignment}
        if emit == "fp8":
            groups = columns // group_size
            tile_rows, spread, depth, num_warps = row_tile(groups, width=FP8_GROUP_SIZE // 8)
            _quantize_encode_kernel[triton.cdiv(rows, tile_rows), experts](
                table, *results, rows, GROUPS=groups, TILE_ROWS=tile_rows, SPREAD=spread, DEPTH=depth, **grid,
                num_warps=num_warps,
            )  # fmt: skip
        else:
            packed, scale, *extra, nonfinite = results
            groups, tile = rows * columns // group_size, _TILE_WEIGHTS // group_size
            _quantize_pack_kernel[triton.cdiv(groups, tile), experts](
                table, packed, scale, extra[0] if extra else packed, nonfinite, groups, BITS=num_bits,
                SHIFT=grid_bits - served_bits, GROUP=group_size, TILE=tile, EMIT_BF16=emit == "bf16", **grid,
            )  # fmt: skip
    return results


@_integer_quantize_pack.register_fake
def _(weights: list[Tensor], group_size: int, _: str, num_bits: int, __: int, ___: int, emit: str) -> list[Tensor]:
    return _empty_results(weights, group_size, num_bits, emit)


def integer_dequantize(packed: Tensor, scale: Tensor, num_bits: int = 4) -> Tensor:
    """Return bf16(code * scale), the weight that GEMMs of integer formats multiply by.

    Args:
        packed: [..., N, K * num_bits / 32] int32, contiguous.
        scale: [..., N, K / group_size] BF16, contiguous.
        num_bits: bits that a code is stored in, 4 or 8.

    Returns:
        [..., N, K] BF16.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `integer.dequantize_integer`.
    """
    _check_packed("integer_dequantize", packed, scale, GROUP_SIZES, num_bits)
    with torch.no_grad():
        return torch.ops.qarl.integer_dequantize(packed, scale, num_bits)


@torch.library.custom_op("qarl::integer_dequantize", mutates_args=())
def _integer_dequantize(packed: Tensor, scale: Tensor, num_bits: int) -> Tensor:
    weight = packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 32 // num_bits, dtype=torch.bfloat16)
    group_size = weight.shape[-1] // scale.shape[-1]
    tile = _TILE_WEIGHTS // group_size
    with torch.cuda.device_of(packed):
        _dequantize_kernel[triton.cdiv(scale.numel(), tile),](
            packed, scale, weight, scale.numel(), BITS=num_bits, GROUP=group_size, TILE=tile
        )
    return weight


@_integer_dequantize.register_fake
def _(packed: Tensor, scale: Tensor, num_bits: int) -> Tensor:  # noqa: ARG001
    return packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 32 // num_bits, dtype=torch.bfloat16)


def int4_encode_fp8(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Re-encode int4 weights for FP8 tensor cores: w8 = fp8(code * s8), weight ~ w8 * channel_scale.

    Args:
        packed: [..., N, K / 8] int32, contiguous.
        scale: [..., N, K / 128] BF16, contiguous.

    Returns:
        w8: [..., N, K] float8_e4m3fn; channel_scale: [..., N, 1] FP32.

    Raises:
        ValueError: a shape, dtype or device is not legal; everything wrong is named.

    Source: `fp8.encode_int4_as_fp8`.
    """
    _check_packed("int4_encode_fp8", packed, scale, (FP8_GROUP_SIZE,))
    with torch.no_grad():
        return torch.ops.qarl.int4_encode_fp8(packed, scale)


@torch.library.custom_op("qarl::int4_encode_fp8", mutates_args=())
def _int4_encode_fp8(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    w8, channel_scale = _empty_encoding(packed)
    groups = scale.shape[-1]
    row_groups, num_rows = triton.next_power_of_2(groups), channel_scale.numel()
    rows = max(1, _ENCODED_GROUPS // row_groups)
    with torch.cuda.device_of(packed):
        _int4_encode_fp8_kernel[triton.cdiv(num_rows, rows),](
            packed,
            scale,
            w8,
            channel_scale,
            num_rows,
            groups,
            ROW_GROUPS=row_groups,
            TILE=min(row_groups, 16),
            ROWS=rows,
            num_warps=2,
        )
    return w8, channel_scale


@_int4_encode_fp8.register_fake
def _(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _empty_encoding(packed)


def _empty_encoding(packed: Tensor) -> tuple[Tensor, Tensor]:
    *batch, words = packed.shape
    w8 = packed.new_empty(*batch, words * 8, dtype=torch.float8_e4m3fn)
    return w8, packed.new_empty(*batch, 1, dtype=torch.float32)


def _check_packed(op: str, packed: Tensor, scale: Tensor, group_sizes: tuple[int, ...], num_bits: int = 4) -> None:
    problems = device_problems([packed, scale])
    if num_bits not in CODE_BITS:
        raise ValueError(f"{op}: num_bits={num_bits} (legal: 4, 8)")
    lanes = 32 // num_bits
    if not (packed.is_contiguous() and scale.is_contiguous()):
        problems.append(f"strides {packed.stride()} and {scale.stride()} (legal: packed and scale contiguous)")
    if (packed.dtype, scale.dtype) != (torch.int32, torch.bfloat16):
        problems.append(f"packed is {packed.dtype} and scale {scale.dtype} (legal: torch.int32, torch.bfloat16)")
    legal = [(*packed.shape[:-1], packed.shape[-1] * lanes // size) for size in group_sizes]
    if packed.ndim < 2 or packed.numel() == 0 or tuple(scale.shape) not in legal:
        problems.append(
            f"scale is {list(scale.shape)} for packed {list(packed.shape)} "
            f"(legal: [..., N, K / {lanes}] and [..., N, K / group_size], "
            f"group_size {', '.join(map(str, group_sizes))})"
        )
    refuse(op, problems)
