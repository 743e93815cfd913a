"""The undamaged inputs: a small Qwen3-MoE, the same as torch_dist, a training config with data, a run's folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_nemo.train.tokenizer import character_tokenizer
from support.files import write_jsonl
from support.megatron.files import Layout, write_megatron
from support.runs import values


def write_model(folder: Path) -> None:
    """Write a Hugging Face checkpoint in several files, with an index and a tokenizer."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=2,
        num_experts_per_tok=1,
        vocab_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="400KB")
    tokenizer.save_pretrained(folder)


def write_torch_dist(folder: Path, model: Path) -> None:
    """Write the same weights as two tensor-parallel ranks of Megatron do.

    Args:
        folder: to be created.
        model: what `write_model` wrote.
    """
    weights = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    config = json.loads((model / "config.json").read_text())
    write_megatron(folder, weights, config, Layout(tp=2))


def write_run(folder: Path) -> None:
    """Write `run.yaml`, `train.jsonl` and `validation.jsonl` of a run of two short steps."""
    folder.mkdir()
    for name, numbers in (("train", range(24)), ("validation", range(24, 32))):
        lines = [{"problem": f"{n}+{n}=", "answer": 2 * n if n % 2 else str(2 * n)} for n in numbers]
        write_jsonl(folder / f"{name}.jsonl", lines)
    config: dict[str, Any] = values(folder / "run")
    config["run_dir"] = "run"
    config["policy"]["model_init"] |= {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 2, "head_dim": 16}
    config["policy"]["warm_start"] = {"steps": 1, "batch_size": 8, "lr": 4.0e-3}
    config["grpo"] |= {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "train_global_batch_size": 4,
        "max_num_steps": 2,
        "val_num_prompts": 4,
    }
    config["data"] = {
        "_override_": True,
        "source": "datasets",
        "train": {"data_path": "train.jsonl"},
        "validation": {"data_path": "validation.jsonl"},
    }
    config["checkpointing"] = {"save_period": 1, "keep_last": 2}
    config["logger"] = {"diagnostics_period": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def copy_fresh(source: Path, destination: Path) -> None:
    """Copy a tree with new times of change, as a file that was repaired has them.

    Args:
        source: what is copied.
        destination: replaced.
    """
    shutil.rmtree(destination, ignore_errors=True)
    shutil.copytree(source, destination, symlinks=True, copy_function=shutil.copyfile)
