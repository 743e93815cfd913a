"""Checkpoints as compressed-tensors itself writes them, and its own numbers for their weights."""

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam, maybe_pad_tensor_for_block_quant
from safetensors.torch import load_file, save_file

from qarl_nemo.names import fused_groups, target_of

STORAGE = {
    "W4A16": "pack-quantized",
    "W8A16": "pack-quantized",
    "W4AFP8": "pack-quantized",
    "FP8_BLOCK": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
}


def write_compressed(source: Path, folder: Path, preset: str, targets, scale_dtype=torch.bfloat16) -> Path:
    """Quantize a BF16 checkpoint to one of compressed-tensors' presets, with scales of a dtype, as a BF16 model's."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    scheme, stored = preset_name_to_scheme(preset, ["Linear"]), load_file(file)
    weights = {name: stored.pop(name) for name in list(stored) if target_of(name) in targets}
    tops = {name: weight.abs().max() for name, weight in weights.items()}
    for group in fused_groups(weights):
        tops |= dict.fromkeys(group, torch.stack([tops[name] for name in group]).max())
    for name, weight in weights.items():
        tensors = _compressed(weight.float(), scheme, STORAGE[preset], scale_dtype, tops[name].float())
        stored |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file(stored, file)
    quantization = QuantizationConfig(config_groups={"group_0": scheme}, format=STORAGE[preset], ignore=["lm_head"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads(json.dumps(quantization.to_dict()))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decompressed(folder: Path, preset: str, module: str, *, dtype=torch.float32, scale_dtype=None) -> torch.Tensor:
    """Return what compressed-tensors makes of one weight of a checkpoint, its scale cast first, [N, K] in `dtype`."""
    (file,) = folder.glob("*.safetensors")
    tensors = {
        name.removeprefix(f"{module}."): one for name, one in load_file(file).items() if name.startswith(f"{module}.")
    }
    if scale_dtype is not None:
        tensors["weight_scale"] = tensors["weight_scale"].to(scale_dtype)
    compressor = BaseCompressor.get_value_from_registry(STORAGE[preset])
    return compressor.decompress(tensors, preset_name_to_scheme(preset, ["Linear"]))["weight"].to(dtype)


def _compressed(weight, scheme, storage, scale_dtype, top) -> dict[str, torch.Tensor]:
    args = scheme.weights
    height, width = args.block_structure or (1, args.group_size or weight.shape[1])
    whole = maybe_pad_tensor_for_block_quant(weight, (height, width))
    blocks = whole.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
    tensors, divisor = {"weight": weight}, None
    if storage.startswith("nvfp4"):
        divisor = generate_gparam(-top.reshape(1), top.reshape(1))
        tensors["weight_global_scale"] = divisor
    scale, _ = calculate_qparams(blocks.amin((-2, -1)), blocks.amax((-2, -1)), args, global_scale=divisor)
    tensors["weight_scale"] = scale.float() if divisor is not None else scale.to(scale_dtype)
    compressed = BaseCompressor.get_value_from_registry(storage).compress(tensors, scheme)
    return {suffix: tensor.contiguous() for suffix, tensor in compressed.items()}
