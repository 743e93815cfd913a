"""The learner of the refit tests: a tiny Qwen3-MoE that every format and layout takes, with random weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_kernels import QuantFormat
from qarl_nemo.layers.install import install
from qarl_nemo.refit.publish import RefitUpdate, publish

# Not a multiple of 64, to which vLLM pads embeddings.
VOCAB_SIZE = 500


def save_model(folder: Path, seed: int, expert_size: int) -> None:
    """Save a BF16 checkpoint of random weights; half of I=512 still divides as w4a8's experts and FP8 blocks must."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=expert_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=8,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        initializer_range=0.06,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            # Norms start as ones in every checkpoint, where one that no refit reached would not show.
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)


def published(source: Path, fmt: QuantFormat, targets: tuple[str, ...], device: str, *, version: int) -> RefitUpdate:
    """Return the update that a learner with aligned layers publishes of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device)
    report = install(model, targets, fmt)
    return publish(report.weights, model.named_parameters(), fmt, version=version)
