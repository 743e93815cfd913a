"""Recipes without NeMo-RL's below them, for machines that do not have it."""

from pathlib import Path
from typing import Any

import yaml

from qarl_nemo.config import merge_mappings

NEMO_RL = "${oc.env:NEMO_RL_ROOT}/examples/configs/"
# What the recipes of Qwen3-30B-A3B inherit of NeMo-RL's, as far as conflicts, layouts and memory ask.
BELOW: dict[str, Any] = {
    "cluster": {"gpus_per_node": 8},
    "env": {"math": {"num_workers": 8}},
    "policy": {
        "precision": "bfloat16",
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "sequence_parallel": True,
        },
        "generation": {
            "backend": "vllm",
            "vllm_cfg": {"async_engine": False},
            "vllm_kwargs": {"moe_backend": "triton"},
        },
    },
}


def own_settings(path: Path) -> dict[str, Any]:
    """What our files of a recipe say, without NeMo-RL's below them."""
    own = yaml.load(path.read_text(), yaml.CSafeLoader)
    parents = own.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if not parent.startswith(NEMO_RL):
            merged = merge_mappings(merged, own_settings(path.parent / parent))
    return merge_mappings(merged, own)
