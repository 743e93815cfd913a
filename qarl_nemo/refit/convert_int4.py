"""vLLM's conversions of integer codes for all experts of a layer at once; vLLM converts one by one, or on the host.

The operators are the same, with one call for all experts. On an H200 a layer of Qwen3-30B-A3B takes 1.5 ms instead of
vLLM's 15 (Marlin), so that every step can afford a refit. `convert.py` compares the first layer with vLLM's conversion.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NIBBLE_SIGNS = -0x77777778  # 0x88888888 as int32: q + 8 in four bits becomes two's complement q
EXPERT_PARTS = ("w13", "w2")
_STRIPE_WORDS = 4  # CUTLASS's tiles of W4A8 are 32 codes wide


def quick_conversion(layer: nn.Module) -> Callable[[nn.Module], dict[str, Tensor]] | None:
    """Return this module's conversion of a layer's weights, if it has one.

    Args:
        layer: vLLM's linear or layer of routed experts.

    Returns:
        A function from a layer that holds its parameters as checkpoints are loaded to kernel tensors by name; None:
        use vLLM's own.
    """
    method = type(getattr(layer, "quant_method", None)).__name__
    if method == "CompressedTensorsW4A8Fp8MoEMethod":
        return _w4a8_experts
    if method == "CompressedTensorsWNA16MarlinMoEMethod" and _is_plain_marlin(layer):
        return _marlin
    if type(getattr(layer, "scheme", None)).__name__ == "CompressedTensorsW4A8Fp8":
        return _w4a8_linear
    return None


def _is_plain_marlin(layer: nn.Module) -> bool:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_padded_intermediate

    method: Any = layer.quant_method
    size = layer.intermediate_size_per_partition
    plain = method.wna16_backend.name == "MARLIN" and method.marlin_input_dtype is None
    return plain and marlin_moe_padded_intermediate(size, method.group_size) == size


def _marlin(layer: nn.Module) -> dict[str, Tensor]:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales

    converted = {}
    method: Any = layer.quant_method
    for part in EXPERT_PARTS:
        packed, scale = getattr(layer, f"{part}_weight_packed").data, getattr(layer, f"{part}_weight_scale").data
        _, words, size_n = packed.shape
        converted[f"{part}_weight_packed"] = repack_experts(packed, method.num_bits)
        size_k = words * 32 // method.num_bits
        scales = marlin_permute_scales(scale.view(-1, size_n), size_k, size_n, method.group_size)
        converted[f"{part}_weight_scale"] = scales.view_as(scale)
    return converted


def repack_experts(packed: Tensor, num_bits: int = 4) -> Tensor:
    """Return all experts' codes in Marlin's order, with one call of vLLM's operator.

    Args:
        packed: [E, K * num_bits / 32, N] int32, contiguous.
        num_bits: bits of a code, 4 or 8.

    Returns:
        [E, K / 16, N * num_bits / 2] int32.
    """
    from vllm import _custom_ops as ops

    num_experts, words, size_n = packed.shape
    size_k = words * 32 // num_bits
    no_order = torch.empty(0, dtype=torch.int32, device=packed.device)
    # Tiles run along K first, so experts stacked along K are repacked as they would be one by one.
    tall = ops.gptq_marlin_repack(packed.view(-1, size_n), no_order, num_experts * size_k, size_n, num_bits)
    return tall.view(num_experts, size_k // 16, -1)


def _encode_and_reorder(packed: Tensor) -> Tensor:
    from vllm import _custom_ops as ops

    num_experts, size_n, words = packed.shape
    tall, _ = ops.cutlass_encode_and_reorder_int4b_grouped(packed.view(1, num_experts * size_n, words))
    # Tiles run along N first, so with experts stacked along N each stripe of K holds the tiles of every expert.
    return tall.view(words // _STRIPE_WORDS, num_experts, -1).transpose(0, 1).reshape(packed.shape)


def _w4a8_experts(layer: nn.Module) -> dict[str, Tensor]:
    converted = {}
    for part in EXPERT_PARTS:
        packed, scale = getattr(layer, f"{part}_weight_packed").data, getattr(layer, f"{part}_weight_scale").data
        converted[f"{part}_weight_packed"] = _encode_and_reorder(packed ^ _NIBBLE_SIGNS)
        products, channel = _w4a8_scales(scale)
        converted |= {f"{part}_weight_scale": products, f"{part}_weight_chan_scale": channel}
    return converted


def _w4a8_linear(layer: nn.Module) -> dict[str, Tensor]:
    from vllm import _custom_ops as ops

    packed = ops.cutlass_encode_and_reorder_int4b((layer.get_parameter("weight_packed").data ^ _NIBBLE_SIGNS).t())
    products, channel = _w4a8_scales(layer.get_parameter("weight_scale").data)
    return {"weight_packed": packed, "weight_scale": products, "weight_chan_scale": channel}


def _w4a8_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, convert_bf16_scales_to_fp8

    scale8, channel = convert_bf16_scales_to_fp8(QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN), scale)
    # The kernel looks up code * scale: eight products for each scale, of the codes -8 to -1.
    codes = torch.arange(-8, 0, dtype=torch.float32, device=scale.device)
    products = scale8.transpose(-1, -2).contiguous().float().unsqueeze(-1) * codes
    return products.to(scale8.dtype).flatten(), channel
