"""The formats that are tested, weights in which a swapped or shifted scale shows, activations as the GEMM sees them."""

import torch
from torch import Tensor

from qarl_kernels import QuantFormat, QuantizedWeight, get_format

FORMATS = {
    "w4a16": get_format("w4a16"),
    "w4a16_g32_narrow": get_format("w4a16", group_size=32, scale_convention="narrow_range"),
    "w3a16_g64": get_format("w3a16", group_size=64),
    "w4a8": get_format("w4a8"),
    "fp8_block": get_format("fp8_block"),
    "fp8_channel": get_format("fp8_channel"),
    "int8": get_format("int8"),
    "nvfp4": get_format("nvfp4"),
    "bf16": get_format("bf16"),
}

# What stores a weight of each kind.
SUFFIXES = {
    "int": ("weight_packed", "weight_scale"),
    "fp8_blocks": ("weight", "weight_scale_inv"),
    "fp8_rows": ("weight", "weight_scale"),
    "int8_rows": ("weight", "weight_scale"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "plain": ("weight",),
}


def uneven_weight(*shape: int) -> Tensor:
    """BF16 Gaussian weights [..., N, K] whose size differs by powers of two between rows and between 32-wide groups."""
    *batch, rows, columns = shape
    row_size = torch.exp2(torch.randint(-2, 3, (*batch, rows, 1)).float())
    group_size = torch.exp2(torch.randint(-2, 3, (*batch, rows, columns // 32)).float())
    weight = torch.randn(shape) * row_size * group_size.repeat_interleave(32, -1) * columns**-0.5
    return weight.to(torch.bfloat16)


def moved(stored: QuantizedWeight, device: str) -> QuantizedWeight:
    """The same stored tensors on another device."""
    tensors = {suffix: tensor.to(device) for suffix, tensor in stored.tensors.items()}
    return QuantizedWeight(stored.format, stored.shape, tensors)


def quantized_activations(x: Tensor, fmt: QuantFormat, *, after_swiglu: bool = False) -> Tensor:
    """x as float64 after a dense layer's activation quantization, written down again from the engine's formulas."""
    if fmt.activation_kind == "none":
        return x.double()
    if fmt.activation_kind == "int8_token":
        amax = x.float().abs().amax(-1, keepdim=True)
        return torch.round(x.float() * (torch.full_like(amax, 127) / amax)).double() * (amax / 127).double()
    rows = x.float() if fmt.activation_kind == "fp8_token" else x.float().unflatten(-1, (-1, 128))
    amax = rows.abs().amax(-1, keepdim=True)
    if fmt.activation_kind == "fp8_token" or after_swiglu:
        scale = torch.maximum(amax / 448, torch.tensor(1 / (448 * 512)))
    else:
        scale = torch.maximum(amax, torch.tensor(1e-10)) / 448
    values = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
    return values.view(x.shape)
