"""The learner of the refit tests: tiny models that every format and layout takes, with random weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from qarl_kernels import QuantFormat
from qarl_nemo.layers.frozen import FrozenBase, freeze
from qarl_nemo.layers.install import install
from qarl_nemo.layers.lora import LoraSettings, add_adapters
from qarl_nemo.refit.adapters import scaled
from qarl_nemo.refit.publish import RefitUpdate, publish, publish_layers
from qarl_nemo.train.trained import save_trained

# Not a multiple of 64, to which vLLM pads embeddings.
VOCAB_SIZE = 500


def save_model(folder: Path, seed: int, expert_size: int) -> None:
    """Save a BF16 checkpoint of random weights; half of I=512 still divides as w4a8's experts and FP8 blocks must."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "initializer_range": 0.06,
    }
    experts = {"moe_intermediate_size": expert_size, "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 128}
    config = Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True) if expert_size else Qwen2Config(**sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            # They start alike in every checkpoint, where one that no refit reached would not show.
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)


def published(source: Path, fmt: QuantFormat, targets: tuple[str, ...], device: str, *, version: int) -> RefitUpdate:
    """Return the update that a learner with aligned layers publishes of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device)
    report = install(model, targets, fmt)
    return publish(report.weights, model.named_parameters(), fmt, version=version)


def lora_of(targets: tuple[str, ...]) -> LoraSettings:
    """The settings of the tests' adapters."""
    return LoraSettings(rank=8, alpha=16.0, targets=targets)


def published_adapters(
    base: Path, fmt: QuantFormat, targets: tuple[str, ...], device: str, seed: int, folder: Path
) -> RefitUpdate:
    """Return the update of a learner that trains adapters and norms on a frozen base; its adapters go to `folder`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device)
    report, lora = install(model, targets, fmt), lora_of(targets)
    model.requires_grad_(False)
    freeze(model, report)
    add_adapters(model, lora, seed=seed)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator, device=device))
        elif name.endswith("layernorm.weight"):
            parameter.data.mul_(1 + seed / 8)
    save_trained(model, folder, lora, str(base))
    layers = publish_layers(report.weights, FrozenBase.of(model).refitted(model), fmt)
    layers = scaled(layers, lora.alpha / lora.rank)
    return RefitUpdate.of(layers, fmt, version=0)
