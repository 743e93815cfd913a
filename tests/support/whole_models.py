"""Whole tiny models by their configs: every tensor that the table of architectures names."""

from pathlib import Path

import torch

from qarl_nemo.architecture import Architecture
from qarl_nemo.checkpoints.reader import Checkpoint, TensorInfo

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
}
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def shapes_of(config):
    """Return name -> shape of a model."""
    return dict(Architecture.parse(config, "config.json").parameters())


def tensors_of(config, dtype=torch.bfloat16):
    """Return random tensors of a whole model."""
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes_of(config).items()}


def checkpoint_of(config, changes=None, dtype="BF16"):
    """Return the table of contents of a model; `changes` replace shapes, None leaves a tensor out."""
    shapes = shapes_of(config) | (changes or {})
    infos = tuple(
        TensorInfo(name, shape, dtype, ("model.safetensors",)) for name, shape in shapes.items() if shape is not None
    )
    return Checkpoint(Path("source"), Path("source"), dict(config), infos, lambda: None)
