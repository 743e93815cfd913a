"""Both sides of a refit bench: a vLLM engine started from a config alone, and a learner with random packed weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_kernels import QuantFormat, QuantizedWeight, quantize_weight
from qarl_nemo.checkpoints.hf_config import model_quantization_config
from qarl_nemo.names import module_kind
from qarl_nemo.refit.engine_settings import kernel_options
from qarl_nemo.refit.publish import RefitUpdate, publish

_MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen3-30b-a3b"
# vLLM reads these when it is imported.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Packed:
    """An aligned weight for the publisher, already quantized; its master is gone."""

    name: str
    format: QuantFormat
    stored: QuantizedWeight

    def quantized(self) -> QuantizedWeight:
        """Return the stored tensors."""
        return self.stored


class Learner:
    """Random weights of a model, the targeted ones packed.

    Args:
        config: the model's config.
        fmt: the targeted weights' format.
        targets: what is quantized.
        device: where they are.
    """

    def __init__(self, config: Qwen3MoeConfig, fmt: QuantFormat, targets: tuple[str, ...], device: str) -> None:
        self.format = fmt
        self.weights: dict[str, Packed] = {}
        self.others: list[tuple[str, Tensor]] = []
        for name, shape in shapes(config).items():
            weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
            module = name.removesuffix(".weight")
            if module_kind(module) in targets:
                self.weights[name] = Packed(module, fmt, quantize_weight(weight, fmt, name=name))
            else:
                self.others.append((name, weight))

    def publish(self, number: int) -> RefitUpdate:
        """Return the update with this version number; its manifest is computed anew."""
        return publish(self.weights, self.others, self.format, version=number)


def shapes(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    """Return every parameter's shape."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def model_config(num_layers: int) -> Qwen3MoeConfig:
    """Return Qwen3-30B-A3B's config with so many of its 48 layers."""
    return Qwen3MoeConfig.from_pretrained(_MODEL, num_hidden_layers=num_layers)


def start(config: Qwen3MoeConfig, fmt: QuantFormat, targets: tuple[str, ...], folder: Path) -> Any:
    """Start the engine from a config alone."""
    from vllm import LLM

    config.save_pretrained(folder)
    quantization = model_quantization_config(fmt, shapes(config), targets)
    if quantization is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        worker_extension_cls="qarl_nemo.refit.load.PackedRefit",
        max_model_len=1024,
        max_num_seqs=64,
        kv_cache_memory_bytes=2**30,
        gpu_memory_utilization=0.1,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 8, 64],
            "custom_ops": ["+quant_fp8"],
        },
        **kernel_options(fmt, ["experts"]),
    )
