"""The table of architectures is transformers' models."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qarl_nemo.architecture import FAMILIES, MEGATRON_FAMILIES, read_architecture

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VARIANTS = {
    "qwen3_moe": EXPERTS,
    "qwen3_moe-mixed": EXPERTS | {"mlp_only_layers": [2], "decoder_sparse_step": 2, "tie_word_embeddings": True},
    "qwen3_moe-head": EXPERTS | {"head_dim": 8},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True, "head_dim": 32},
    "qwen2": {},
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
    "llama-mlp_bias": {"mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "mistral-head": {"head_dim": 24, "tie_word_embeddings": True},
}


def per_expert(model):
    """Name -> shape as checkpoints hold them."""
    shapes = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if ".experts." not in name:
            shapes[name] = shape
            continue
        block, _, stacked = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if stacked == "gate_up_proj" else ("down_proj",)
        for expert in range(shape[0]):
            for part in parts:
                shapes[f"{block}.{expert}.{part}.weight"] = (shape[1] // len(parts), shape[2])
    return shapes


@pytest.mark.parametrize("name", VARIANTS)
def test_the_table_is_transformers_models(name, tmp_path):
    config = AutoConfig.for_model(name.partition("-")[0], **SIZES, **VARIANTS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    # What transformers leaves out of a config is what it defaults to.
    assert dict(read_architecture(tmp_path).parameters()) == per_expert(model)


def test_every_family_is_tried():
    assert {name.partition("-")[0] for name in VARIANTS} == set(FAMILIES)
    assert set(MEGATRON_FAMILIES) == {"qwen2", "qwen3", "qwen3_moe"}
