"""Checkpoint conversion: Hugging Face safetensors or Megatron torch_dist in, quantized vLLM checkpoints out."""

from qarl_nemo.checkpoints.hf_config import model_quantization_config
from qarl_nemo.checkpoints.megatron import open_megatron
from qarl_nemo.checkpoints.plan import DEFAULT_MAX_SHARD_BYTES, plan_quantization
from qarl_nemo.checkpoints.quantize import QuantizeProgress, QuantizeReport, quantize_checkpoint
from qarl_nemo.checkpoints.reader import Checkpoint, open_checkpoint

__all__ = [
    "DEFAULT_MAX_SHARD_BYTES",
    "Checkpoint",
    "QuantizeProgress",
    "QuantizeReport",
    "model_quantization_config",
    "open_checkpoint",
    "open_megatron",
    "plan_quantization",
    "quantize_checkpoint",
]
