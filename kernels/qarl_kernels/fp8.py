"""FP8 (E4M3) quantization of weights and activations with the engine's formulas: true division, floors, saturation.

`scale` multiplies to dequantize. Casts saturate at +-448 and round to nearest even.
"""

import torch
from torch import Tensor

from qarl_formats import FP8_BLOCK
from qarl_kernels.division import divide, nonzero_scale

FP8_MAX = 448.0
# vLLM's floor of per-token and fused SwiGLU scales: csrc/quantization/w8a8/fp8/common.cu.
MIN_TOKEN_SCALE = 1.0 / (FP8_MAX * 512.0)
# vLLM's floor of a 1x128 group's maximum: csrc/.../per_token_group_quant.cu.
MIN_GROUP_AMAX = 1e-10


def cast_fp8(values: Tensor) -> Tensor:
    """Round to E4M3 with saturation: fp8_rn(clamp(values, -448, 448)).

    Args:
        values: any shape, FP32.

    Returns:
        The same shape in float8_e4m3fn.
    """
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantize_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each output row: scale = amax / 448, w8 = fp8(w / scale); an all-zero row gets scale 1.

    Args:
        weight: [..., N, K] float.

    Returns:
        w8: [..., N, K] float8_e4m3fn; scale: [..., N, 1] FP32.
    """
    weight = weight.float()
    scale = nonzero_scale(divide(weight.abs().amax(-1, keepdim=True), FP8_MAX))
    return cast_fp8(weight / scale), scale


def quantize_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize 128x128 blocks: scale = amax / 448, w8 = fp8(w / scale); edge blocks may be partial.

    Args:
        weight: [..., N, K] float.

    Returns:
        w8: [..., N, K] float8_e4m3fn; scale: [..., ceil(N/128), ceil(K/128)] FP32.
    """
    weight = weight.float()
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    scale = nonzero_scale(divide(blocks.abs().amax((-3, -1)), FP8_MAX))
    return cast_fp8(weight / expand_block_scale(scale, rows, columns)), scale


def expand_block_scale(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat each block's scale over its 128x128 elements.

    Args:
        scale: [..., ceil(N/128), ceil(K/128)].
        rows: N.
        columns: K.

    Returns:
        [..., N, K] of the scale's dtype.
    """
    wide = scale.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    return wide[..., :rows, :columns]


def quantize_token(activations: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each token: scale = max(amax / 448, 1/(448*512)), a8 = fp8(x / scale).

    Args:
        activations: [M, K] float.

    Returns:
        a8: [M, K] float8_e4m3fn; scale: [M, 1] FP32.

    Source: vLLM 0.25.1 csrc/libtorch_stable/quantization/w8a8/fp8/common.cu.
    """
    activations = activations.float()
    scale = divide(activations.abs().amax(-1, keepdim=True), FP8_MAX).clamp(min=MIN_TOKEN_SCALE)
    return cast_fp8(activations / scale), scale


def quantize_group(activations: Tensor, *, after_swiglu: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize 1x128 groups: scale = max(amax, 1e-10) / 448, or max(amax / 448, 1/(448*512)) fused after SwiGLU.

    Args:
        activations: [M, K] float, K a multiple of 128.
        after_swiglu: use the floor of the engine's fused SwiGLU quantizer.

    Returns:
        a8: [M, K] float8_e4m3fn; scale: [M, K / 128] FP32.

    Source: vLLM 0.25.1 per_token_group_quant.cu and fused_silu_mul_block_quant.cu (E8M0 off).
    """
    groups = activations.float().unflatten(-1, (-1, FP8_BLOCK))
    amax = groups.abs().amax(-1, keepdim=True)
    if after_swiglu:
        scale = divide(amax, FP8_MAX).clamp(min=MIN_TOKEN_SCALE)
    else:
        scale = divide(amax.clamp(min=MIN_GROUP_AMAX), FP8_MAX)
    return cast_fp8(groups / scale).flatten(-2), scale.squeeze(-1)


def encode_int4_as_fp8(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Re-encode int4 weights for FP8 tensor cores: W8 = fp8(code * s8), W ~ W8 * channel_scale.

    channel_scale = max(max_g s / 448, 1/(448*512)); s8 = fp8(fp8(s / channel_scale) / 8); channel_scale *= 8.

    Args:
        codes: [..., N, K] int8 in [-8, 7].
        scale: [..., N, G] BF16 group scales.

    Returns:
        w8: [..., N, K] float8_e4m3fn; channel_scale: [..., N, 1] FP32.

    Source: vLLM 0.25.1 convert_bf16_scales_to_fp8 (quant_utils.py) and the CUTLASS int4 x fp8 lookup table.
    """
    scale = scale.float()
    channel_scale = divide(scale.amax(-1, keepdim=True), FP8_MAX).clamp(min=MIN_TOKEN_SCALE)
    # Codes reach -8, so group scales up to 448 / 8 keep code * s8 within E4M3.
    scale8 = cast_fp8(cast_fp8(scale / channel_scale).float() / 8.0)
    groups = codes.float().unflatten(-1, (scale.shape[-1], -1))
    return cast_fp8(groups * scale8.float().unsqueeze(-1)).flatten(-2), channel_scale * 8.0
