"""FP8 grouped GEMMs for sm_90: each expert's rows times that expert's weight.

channel: y = bf16(w_scale[e, n] * (a_scale[m] * (a8 @ w8[e]^T))), summed in the tensor cores (fast accumulation), or
the two scales in the other order, and with it y = bf16(fma(a_scale[m], w_scale[e, n] * (a8 @ w8[e]^T), bias[n])).
block: acc += (a8 @ w8[e]^T) * (a_scale[m, k] * w_scale[e, n, k]) per 128 of K, in FP32; y = bf16(acc * row_weight[m]).
Operands: a8 [M, K] and w8 [E, N, K] float8_e4m3fn, scales FP32, offsets [E + 1] int32 on the device, all contiguous;
expert e owns rows offsets[e] to offsets[e + 1]. The kernel is in `hopper_gemm`, its output in `hopper_store`.

Why beside `grouped_gemm`: a kernel written for one GPU can give loads and products to different warps, which plain
Triton cannot. The price is that it serves sm_90 and multiples of 128 only; the plain Triton kernels serve the rest.
SwiGLU and its quantization are not fused into fc1: training needs fc1's output stored as well, and measured with that
store the fused kernel was slower.
"""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qarl_formats import FP8_BLOCK
from qarl_kernels.ops.checks import refuse, tensor_problems
from qarl_kernels.ops.gemm_checks import bias_problems
from qarl_kernels.ops.grouped_gemm import fake_rows
from qarl_kernels.ops.hopper_gemm import hopper_gemm_kernel
from qarl_kernels.ops.hopper_store import BF16_TILE, FP8_TILE

# 192 KiB of operands beside 32 KiB of output tiles: what one program's shared memory holds.
NUM_STAGES = 4
HOPPER = (9, 0)


def hopper_grouped_gemm_fp8_channel(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    channel_first: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply with scales per token and channel: y = bf16(w_scale[e, n] * (a_scale[m] * (a8 @ w8[e]^T))).

    Args:
        a8: [M, K] float8_e4m3fn, rows sorted by expert; K a multiple of 128.
        a_scale: [M, 1] FP32.
        w8: [E, N, K] float8_e4m3fn; N a multiple of 128.
        w_scale: [E, N, 1] FP32.
        offsets: [E + 1] int32 on the device.
        channel_first: multiply by w_scale before a_scale, which differs in the last bit.
        bias: [N] BF16, added in the same instruction that multiplies by a_scale; with channel_first only.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: an operand's shape, dtype, device or layout is not the stated one.
    """
    _check("hopper_grouped_gemm_fp8_channel", a8, a_scale, w8, w_scale, offsets, block=False)
    refuse("hopper_grouped_gemm_fp8_channel", bias_problems(bias, w8.shape[1], channel_first=channel_first))
    return _op(a8, a_scale, w8, w_scale, offsets, None, bias, False, channel_first)


def hopper_grouped_gemm_fp8_block(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    row_weight: Tensor | None = None,
) -> Tensor:
    """Multiply with scales per block: acc += (a8 @ w8[e]^T) * (a_scale * w_scale), y = bf16(acc * row_weight[m]).

    Args:
        a8: [M, K] float8_e4m3fn, rows sorted by expert; K a multiple of 128.
        a_scale: [M, K / 128] FP32.
        w8: [E, N, K] float8_e4m3fn; N a multiple of 128.
        w_scale: [E, N / 128, K / 128] FP32.
        offsets: [E + 1] int32 on the device.
        row_weight: [M] FP32, applied to the FP32 accumulator; None = 1.

    Returns:
        [M, N] BF16.

    Raises:
        ValueError: an operand's shape, dtype, device or layout is not the stated one.

    Source: the promotion of DeepGEMM's fp8_gemm (per K-block, on the CUDA cores).
    """
    _check("hopper_grouped_gemm_fp8_block", a8, a_scale, w8, w_scale, offsets, block=True, row_weight=row_weight)
    return _op(a8, a_scale, w8, w_scale, offsets, row_weight, None, True, False)


@torch.library.custom_op("qarl::hopper_grouped_gemm_fp8", mutates_args=())
def _op(
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    bias: Tensor | None,
    block: bool,
    channel_first: bool,
) -> Tensor:
    num_experts, num_columns, depth = w8.shape
    out = a8.new_empty(len(a8), num_columns, dtype=torch.bfloat16)
    if len(a8) == 0:
        return out
    hopper_gemm_kernel[(_num_sms(a8.device.index),)](
        _descriptor(a8, 64),
        _descriptor(w8.view(-1, depth), 128),
        _descriptor(out, 64),
        out,
        a_scale,
        w_scale,
        row_weight,
        bias,
        offsets,
        num_experts,
        len(a8),
        num_columns,
        depth,
        BLOCK=block,
        WEIGHTED=row_weight is not None,
        CHANNEL_FIRST=channel_first,
        EXPERTS=max(128, 1 << (num_experts - 1).bit_length()),
        STAGES=NUM_STAGES,
        num_warps=4,
    )
    return out


_op.register_fake(fake_rows)


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    layout = BF16_TILE if tensor.dtype == torch.bfloat16 else FP8_TILE
    return TensorDescriptor.from_tensor(tensor, [rows, FP8_BLOCK], layout.value)


@functools.cache
def _num_sms(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != HOPPER:
        raise ValueError(f"cuda:{device} has compute capability {properties.major}.{properties.minor} (legal: 9.0)")
    return properties.multi_processor_count


def _check(
    op: str,
    a8: Tensor,
    a_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    *,
    block: bool,
    row_weight: Tensor | None = None,
) -> None:
    if not a8.is_cuda:
        refuse(op, [f"a8 is on {a8.device} (legal: cuda; Triton's interpreter does not run this one)"])
    problems = tensor_problems("a8", a8, (torch.float8_e4m3fn,)) + tensor_problems("w8", w8, (torch.float8_e4m3fn,), 3)
    refuse(op, problems)
    rows, depth = a8.shape
    experts, n, _ = w8.shape
    if w8.shape[2] != depth or depth % FP8_BLOCK or n % FP8_BLOCK or 0 in w8.shape:
        legal = f"equal K, and K and N multiples of {FP8_BLOCK}"
        problems.append(f"a8 is {list(a8.shape)} and w8 {list(w8.shape)} (legal: {legal})")
    scales = {
        "a_scale": (a_scale, [rows, depth // FP8_BLOCK if block else 1]),
        "w_scale": (w_scale, [experts, n // FP8_BLOCK, depth // FP8_BLOCK] if block else [experts, n, 1]),
        "row_weight": (row_weight, [rows]),
    }
    others = [(name, *scale, torch.float32) for name, scale in scales.items() if scale[0] is not None]
    for name, tensor, shape, dtype in [*others, ("offsets", offsets, [experts + 1], torch.int32)]:
        problems += tensor_problems(name, tensor, (dtype,), len(shape))
        if list(tensor.shape) != shape or tensor.device != a8.device:
            problems.append(f"{name} is {list(tensor.shape)} on {tensor.device} (legal: {shape} on {a8.device})")
    refuse(op, problems)
