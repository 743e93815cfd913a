"""Rotation of pairs (x_i, x_{i + D/2}) of each head: bf16(x cos - y sin) and bf16(y cos + x sin), FP32 inside.

A product of two BF16 numbers is exact in FP32, so only the sum rounds, whether or not it is fused.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.ops.checks import refuse
from qarl_kernels.ops.exact_math import INTERPRETED

_ELEMENTS = 2048  # pairs of one program


@triton.jit
def _rotation_kernel(
    x_ptr,  # [A, B, heads, 2 PAIRS]
    cos_ptr,  # [A, B, 2 PAIRS]
    sin_ptr,  # [A, B, 2 PAIRS]
    out_ptr,  # [A, B, heads, 2 PAIRS], contiguous
    B,
    num_heads,
    x_stride_a,
    x_stride_b,
    x_stride_head,
    cos_stride_a,
    cos_stride_b,
    sin_stride_a,
    sin_stride_b,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    a, b = token // B, token % B
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, WIDTH)
    angle = pair < PAIRS
    mask = (head < num_heads)[:, None] & angle[None, :]
    to_cos = cos_ptr + a * cos_stride_a + b * cos_stride_b + pair
    to_sin = sin_ptr + a * sin_stride_a + b * sin_stride_b + pair
    cos_first = tl.load(to_cos, mask=angle, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(to_cos + PAIRS, mask=angle, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(to_sin, mask=angle, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(to_sin + PAIRS, mask=angle, other=0.0).to(tl.float32)[None, :]
    to_x = x_ptr + a * x_stride_a + b * x_stride_b + head[:, None] * x_stride_head + pair[None, :]
    first = tl.load(to_x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(to_x + PAIRS, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        turned_first = first * cos_first + second * sin_second
        turned_second = second * cos_second - first * sin_first
    else:
        turned_first = first * cos_first - second * sin_first
        turned_second = second * cos_second + first * sin_second
    to_out = out_ptr + (token * num_heads + head[:, None]) * (2 * PAIRS) + pair[None, :]
    tl.store(to_out, turned_first.to(tl.bfloat16), mask=mask)
    tl.store(to_out + PAIRS, turned_second.to(tl.bfloat16), mask=mask)


def rotate_pairs_kernel(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Rotate pairs (x_i, x_{i + D/2}).

    Args:
        x: [A, B, heads, D] BF16; D even, a head's elements contiguous.
        cos: [A, B, D] BF16; A and B may be 1.
        sin: likewise.
        back: multiply by the transposed matrix.

    Returns:
        [A, B, heads, D] BF16.

    Raises:
        ValueError: an operand is not legal; everything wrong is named.

    Source: vLLM 0.25.1 csrc/libtorch_stable/pos_encoding_kernels.cu.
    """
    problems = [
        f"{name} is {tensor.dtype} (legal: torch.bfloat16)"
        for name, tensor in (("x", x), ("cos", cos), ("sin", sin))
        if tensor.dtype != torch.bfloat16
    ]
    if x.dim() != 4 or x.shape[-1] % 2:
        problems.append(f"x has shape {list(x.shape)} (legal: [A, B, heads, D], D even)")
    else:
        for name, table in (("cos", cos), ("sin", sin)):
            legal = [(1, x.shape[0]), (1, x.shape[1]), (x.shape[3],)]
            if table.dim() != 3 or any(size not in sizes for size, sizes in zip(table.shape, legal, strict=True)):
                problems.append(f"{name} has shape {list(table.shape)} (legal: {[*x.shape[:2], x.shape[3]]}, or 1)")
    if not INTERPRETED and x.device.type != "cuda":
        problems.append(f"x is on {x.device} (legal: cuda; on a CPU use the torch reference)")
    refuse("rotate_pairs_kernel", problems)
    return _rotation_op(x, cos, sin, back)


@torch.library.custom_op("qarl::rotate_pairs", mutates_args=())
def _rotation_op(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens_a, tokens_b, num_heads, columns = x.shape
    cos, sin = (table.contiguous().expand(tokens_a, tokens_b, columns) for table in (cos, sin))
    width = triton.next_power_of_2(columns // 2)
    heads = min(triton.next_power_of_2(num_heads), max(_ELEMENTS // width, 1))
    strides = (*x.stride()[:3], *cos.stride()[:2], *sin.stride()[:2])
    grid = (tokens_a * tokens_b, triton.cdiv(num_heads, heads))
    sizes = {"PAIRS": columns // 2, "WIDTH": width, "HEADS": heads, "BACK": back}
    _rotation_kernel[grid](x, cos, sin, out, tokens_b, num_heads, *strides, **sizes)
    return out


@_rotation_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:  # noqa: ARG001
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
