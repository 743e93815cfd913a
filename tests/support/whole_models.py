"""Whole tiny models: every tensor that the table of architectures names, and checkpoints of random weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen3MoeConfig

from qarl_kernels import get_format
from qarl_nemo.architecture import Architecture
from qarl_nemo.checkpoints import quantize_checkpoint
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


def save_sparse(
    folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, *, drawn_in=torch.bfloat16, **sizes
) -> Path:
    """Save a BF16 Qwen3-MoE of random weights that every format's kernels take, with its tokenizer if it has one."""
    own = {"vocab_size": 512, "num_experts": 8, "norm_topk_prob": True, "tie_word_embeddings": False}
    if tokenizer is not None:
        own["vocab_size"] = len(tokenizer)
        own |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SPARSE | own | {"initializer_range": 0.06} | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=drawn_in)
    for layer in model.model.layers:
        # Near-equal router probabilities would flip experts between engines; a trained router is not undecided.
        layer.mlp.gate.weight.data *= 8
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def quantized_copies(source: Path, folder: Path, names: Sequence[str], targets: Sequence[str]) -> Mapping[str, Path]:
    """Quantize a checkpoint to each format and return the copies' folders by its name."""
    for name in names:
        quantize_checkpoint(source, folder / name, get_format(name), targets)
    return {name: folder / name for name in names}
