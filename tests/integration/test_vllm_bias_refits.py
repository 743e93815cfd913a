"""The real vLLM on a CPU takes refits of models whose projections have biases, and serves them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qarl_nemo.train.tokenizer import character_tokenizer
from qarl_nemo.train.trainer import Trainer
from qarl_nemo.train.vllm.host import vllm_problem
from support.runs import make_config
from support.vllm.runs import gap, multiply, refit, sample

# isort: split
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

PROBLEM = vllm_problem()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {"qwen2": (Qwen2Config, {}), "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True})}
FORMATS = {
    "w4a16": {"format": "w4a16", "group_size": 64, "targets": ["mlp", "attention"]},
    "bf16": {"format": "bf16", "alignment": "none", "targets": ["mlp"]},
}


@pytest.fixture(autouse=True, scope="module")
def own_groups():
    """Let no later engine of this process find the groups of these: for dense models vLLM makes none of experts."""
    yield
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def save(folder: Path, family: str) -> Path:
    """Save a random model whose biases matter, with its tokenizer."""
    tokenizer, (config, own) = character_tokenizer(), FAMILIES[family]
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": 2}
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}
    model = AutoModelForCausalLM.from_config(config(**sizes, **tokens, **own), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_refit_brings_biases(family, fmt, tmp_path):
    policy = {"_override_": True, "model_path": str(save(tmp_path / "model", family)), "precision": "bfloat16"}
    qarl = {"_override_": True, "router_replay": False, **FORMATS[fmt]}
    rollout = {"engine": "vllm", "max_model_len": 32, "kv_cache_gib": 0.03125}
    trainer = Trainer(make_config(tmp_path / "run", qarl=qarl, policy=policy, rollout=rollout))
    refit(trainer)
    before = sample(trainer)
    assert gap(trainer, before) < 0.1
    multiply(trainer, {"bias": -1.0})
    assert gap(trainer, before) > 0.3
    refit(trainer)
    assert gap(trainer, sample(trainer)) < 0.1


def test_a_llama_is_quantized_beside_what_cpu_vllm_brings_broken(tmp_path):
    source = save(tmp_path / "model", "llama")
    options = ["--format", "w4a16", "--group-size", "64", "--targets", "mlp"]
    command = [sys.executable, "-m", "qarl_nemo", "quantize", str(source), str(tmp_path / "packed"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
