"""Whole runs of a tiny model on one-digit sums: seconds each, with rewards of both kinds."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qarl_nemo.config import merge_mappings, validate
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.trainer import Trainer

STEPS = 4
BASE: dict[str, Any] = {
    "seed": 3,
    "device": "cpu",
    "num_threads": 1,
    "qarl": {"format": "w4a16", "group_size": 32},
    "policy": {
        "model_init": {"num_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1},
        "warm_start": {"steps": 20, "batch_size": 32, "lr": 4.0e-3},
        "optimizer": {"name": "adamw", "lr": 3.0e-4, "warmup_steps": 2},
        "train_micro_batch_size": 8,
        "logprob_batch_size": 16,
    },
    "rollout": {"max_new_tokens": 3},
    "loss_fn": {"objective": "tbpo", "positive_clip_high": 0.2, "negative_clip_low": 0.2, "negative_clip_high": 0.2},
    "grpo": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 4,
        "train_global_batch_size": 16,
        "max_num_steps": STEPS,
        "val_period": 2,
        "val_num_prompts": 16,
    },
    "data": {"source": "arithmetic", "digits": 1, "answer_digits": 1},
    "checkpointing": {"save_period": 2, "keep_last": 2},
    "logger": {"diagnostics_period": 3},
}
QARL = {
    "w4a16": {"format": "w4a16", "group_size": 32},
    "w4a8": {"_override_": True, "format": "w4a8"},
    "fp8_block": {"_override_": True, "format": "fp8_block"},
    "fp8_channel": {"_override_": True, "format": "fp8_channel"},
    "int8": {"_override_": True, "format": "int8"},
    "nvfp4": {"_override_": True, "format": "nvfp4"},
    "w2a16": {"format": "w2a16", "group_size": 32},
    "attention too": {"targets": ["experts", "attention"], "format": "w4a16", "group_size": 32},
    "bf16": {"_override_": True, "alignment": "none", "format": "bf16"},
}


def values(run_dir: Path, **blocks) -> dict[str, Any]:
    return merge_mappings(BASE | {"run_dir": str(run_dir)}, blocks)


def make_config(run_dir: Path, **blocks) -> LocalConfig:
    return validate(values(run_dir, **blocks), LocalConfig, source="test")


def write_config(path: Path, run_dir: Path, **blocks) -> Path:
    OmegaConf.save(OmegaConf.create(values(run_dir, **blocks)), path)
    return path


def train(run_dir: Path, **blocks) -> Trainer:
    trainer = Trainer(make_config(run_dir, **blocks))
    trainer.train()
    return trainer


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def column(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records]


def without_clocks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what a clock or the operating system measured."""
    measured = ("time_s", "timing/", "throughput/", "memory/")
    return [{key: value for key, value in record.items() if not key.startswith(measured)} for record in records]
