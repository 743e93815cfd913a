"""INT8 quantization of weights and activations with the engine's formulas: symmetric codes, one scale per row.

`scale` multiplies to dequantize; codes reach from -127 to 127. vLLM quantizes activations with two kernels: CUDA's in
front of dense layers rounds ties to even, Triton's in the routed experts rounds them away from zero. Both multiply by
127 / amax in place of dividing by the scale.
"""

import torch
from torch import Tensor

from qarl_kernels.division import divide, nonzero_scale

INT8_MAX = 127.0
# Triton's floor of a token's maximum: vllm/.../quantization/utils/int8_utils.py.
MIN_TOKEN_AMAX = 1e-10
# So many products of two codes add up to at most 2^24, the last of the integers that FP32 all holds.
_EXACT_COLUMNS = 1024


def quantize_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each output row: scale = amax / 127, w8 = round(w / scale); an all-zero row gets scale 1.

    Args:
        weight: [..., N, K] float.

    Returns:
        w8: [..., N, K] int8; scale: [..., N, 1] FP32.
    """
    weight = weight.float()
    scale = nonzero_scale(divide(weight.abs().amax(-1, keepdim=True), INT8_MAX))
    return torch.round(weight / scale).to(torch.int8), scale


def quantize_token(activations: Tensor, *, dense: bool) -> tuple[Tensor, Tensor]:
    """Quantize each token: scale = amax / 127, a8 = round(x * (127 / amax)), as the engine's kernel for the layer does.

    Experts: amax is at least 1e-10, ties go away from zero. Dense layers: a token of zeros has scale 0, ties go to
    even.

    Args:
        activations: [M, K] float.
        dense: whether a dense layer multiplies them, and not a routed expert.

    Returns:
        a8: [M, K] int8; scale: [M, 1] FP32.

    Source: vLLM 0.25.1 csrc/libtorch_stable/quantization/w8a8/int8/scaled_quant.cu (dense) and
    `_per_token_quant_int8` in quantization/utils/int8_utils.py (experts).
    """
    activations = activations.float()
    amax = activations.abs().amax(-1, keepdim=True)
    if not dense:
        amax = amax.clamp(min=MIN_TOKEN_AMAX)
    inverse = torch.full_like(amax, INT8_MAX) / amax
    if dense:
        codes = (activations * torch.where(amax == 0, 0.0, inverse)).round().clamp(-INT8_MAX - 1, INT8_MAX)
    else:
        codes = _round_half_away(activations * inverse)
    return codes.to(torch.int8), divide(amax, INT8_MAX)


def exact_product(codes: Tensor, weight: Tensor) -> Tensor:
    """Return the integer product of two matrices of codes, rounded once to FP32.

    Args:
        codes: [M, K] whole numbers from -128 to 127, FP32.
        weight: [N, K] whole numbers from -128 to 127, FP32.

    Returns:
        [M, N] FP32: the bits of float(sum), in whatever order the sum is taken.
    """
    blocks = zip(codes.split(_EXACT_COLUMNS, -1), weight.split(_EXACT_COLUMNS, -1), strict=True)
    first, *others = (left @ right.mT for left, right in blocks)
    if not others:
        return first
    total = first.double()
    for other in others:
        total += other
    return total.float()


def _round_half_away(values: Tensor) -> Tensor:
    size = values.abs()
    # Adding one half would round 0.49999997 up.
    whole = size.floor()
    return torch.copysign(whole + (size - whole >= 0.5), values)
