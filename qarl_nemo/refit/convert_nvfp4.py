"""vLLM's conversion of NVFP4 experts for all experts of a layer at once; vLLM converts one by one and reads the device.

Weights are repacked by Marlin's operator as int4 is (`convert_int4.py`). A block scale becomes a byte without sign,
with five bits of exponent and three of fraction: scale * 2^7 as a half, without its first and last bits. A power of two
common to all experts, by which the global scales are divided, makes the largest scale fill the range.
Source: vLLM 0.25.1, `prepare_nvfp4_moe_layer_for_marlin` in quantization/utils/marlin_utils_fp4.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qarl_nemo.refit.convert_int4 import EXPERT_PARTS, repack_experts

# vLLM keeps these beside the layer's parameters; its kernels read them all the same.
PLAIN_TENSORS = tuple(f"{part}_weight_scale_2" for part in EXPERT_PARTS)
_SCALE_EXPONENT = 2.0**7
_LARGEST = 448 * _SCALE_EXPONENT


def nvfp4_conversion(layer: nn.Module) -> Callable[[nn.Module], dict[str, Tensor]] | None:
    """Return this module's conversion of a layer's weights, if the layer is NVFP4 experts on Marlin.

    Args:
        layer: vLLM's linear or layer of routed experts.

    Returns:
        A function from a layer that holds its parameters as checkpoints are loaded to kernel tensors by name; None:
        use vLLM's own.
    """
    method: Any = getattr(layer, "quant_method", None)
    is_marlin = getattr(getattr(method, "nvfp4_backend", None), "name", "") == "MARLIN"
    return _marlin if type(method).__name__ == "CompressedTensorsW4A4Nvfp4MoEMethod" and is_marlin else None


def _marlin(layer: nn.Module) -> dict[str, Tensor]:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import nvfp4_marlin_process_global_scale

    converted = {}
    for part in EXPERT_PARTS:
        packed, scale = getattr(layer, f"{part}_weight_packed").data, getattr(layer, f"{part}_weight_scale").data
        divisor = getattr(layer, f"{part}_weight_global_scale").data
        num_experts, size_n, groups = scale.shape
        converted[f"{part}_weight"] = repack_experts(packed.view(torch.int32).transpose(1, 2).contiguous())
        scales = scale.to(layer.params_dtype).transpose(1, 2).reshape(-1, size_n)
        scales = marlin_permute_scales(scales, groups * 16, size_n, 16)
        factor = range_factor(scale)
        converted[f"{part}_weight_scale"] = marlin_scale_bytes(scales, factor).view(num_experts, groups, size_n)
        # Gate and up have the same.
        global_scale = 1.0 / divisor.view(num_experts, -1)[:, 0].contiguous()
        global_scale = nvfp4_marlin_process_global_scale(global_scale, layer.params_dtype)
        converted[f"{part}_weight_scale_2"] = global_scale / factor
        converted[f"{part}_weight_global_scale"] = divisor
    return converted


def range_factor(scale: Tensor) -> Tensor:
    """Return the largest power of two, 1 or more, that leaves every scale at most 448, without reading the device.

    Args:
        scale: E4M3, any shape.

    Returns:
        [] FP32.
    """
    largest = scale.float().amax() * _SCALE_EXPONENT
    return (_LARGEST / largest).log2().floor().exp2().clamp(min=1.0)


def marlin_scale_bytes(scales: Tensor, factor: Tensor) -> Tensor:
    """Return scales in Marlin's form: five bits of exponent, three of fraction, columns 1 and 2 of four exchanged.

    Args:
        scales: [rows, N] BF16, from 2^-6 on, in the order of `marlin_permute_scales`.
        factor: `range_factor`.

    Returns:
        [rows, N] bytes, called float8_e4m3fn by vLLM.
    """
    reordered = scales.view(-1, 4)[:, [0, 2, 1, 3]].view(scales.shape)
    half = (reordered.float() * (factor * _SCALE_EXPONENT)).to(torch.half)
    return (half.view(torch.int16) >> 7).to(torch.uint8).view(torch.float8_e4m3fn)
