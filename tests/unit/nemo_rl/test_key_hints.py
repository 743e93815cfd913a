"""Misspelt keys of NeMo-RL's get a hint with the key that was meant; keys that its types merely lack get none."""

import sys
from types import ModuleType
from typing import Any, NotRequired, Optional, Union

import pytest
from pydantic import BaseModel

# Which pydantic asks for before Python 3.12.
from typing_extensions import TypedDict

from qarl_nemo.nemo_rl.checks.key_hints import config_types, key_hints


class Off(TypedDict):
    enabled: bool


class Packing(TypedDict):
    enabled: bool
    train_mb_tokens: int


class Megatron(TypedDict):
    expert_model_parallel_size: int
    model_overrides: NotRequired[dict[str, Any]]


class Generation(TypedDict):
    temperature: float


class Policy(TypedDict):
    sequence_packing: NotRequired[Union[Off, Packing]]  # noqa: UP007, as NeMo-RL spells it
    megatron_cfg: Megatron | None
    generation: Optional[Generation]  # noqa: UP045


class Grpo(BaseModel, extra="allow"):
    num_prompts_per_step: int


class Master(BaseModel, extra="allow"):
    policy: Policy
    grpo: Grpo
    env: dict[str, Any]


class EngineArguments(TypedDict):
    gpu_memory_utilization: float


class VllmConfig(Generation):
    vllm_cfg: EngineArguments


TYPES = {"": Master, "policy.generation": VllmConfig}


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("policy.sequence_packing.train_mb_token", "train_mb_tokens"),
        ("policy.generation.vllm_cfg.gpu_memory_utilisation", "gpu_memory_utilization"),
        ("policy.megatron_cfg.expert_parallel_size", "expert_model_parallel_size"),
        ("grpo.num_prompt_per_step", "num_prompts_per_step"),
        ("polcy", "policy"),
        ("policy.megatron_cfg.ep", "expert_model_parallel_size"),
    ],
)
def test_a_misspelt_key_names_the_one_that_was_meant(misspelt, meant):
    *blocks, last = misspelt.split(".")
    config: dict[str, Any] = {last: 1}
    for block in reversed(blocks):
        config = {block: config}
    (line,) = key_hints(config, TYPES)
    assert line.startswith(f"{misspelt}: no key that NeMo-RL's config has")
    assert line.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("key", ["foo", "grpo.learning_rate"])
def test_a_key_that_a_complete_block_lacks_is_named_without_another(key):
    block, _, last = key.rpartition(".")
    (line,) = key_hints({block: {last: 1}} if block else {last: {"bar": 1}}, TYPES)
    assert line == f"{key}: NeMo-RL has no such key, and probably ignores it; remove it"


def test_other_keys_get_no_hint():
    generation = {"temperature": 1.0, "val_temperature": 1.0, "vllm_cfg": {"gpu_memory_utilization": 0.6, "own": 1}}
    megatron = {"expert_model_parallel_size": 8, "model_overrides": {"expert_parallel_size": 8}, "moe_dtype": "fp32"}
    policy = {"sequence_packing": {"enabled": False}, "megatron_cfg": megatron, "generation": generation}
    config = {"policy": policy, "grpo": {"num_prompts_per_step": 8}, "env": {"polcy": 1}, "qarl": {"format": "w4a16"}}
    assert key_hints(config, TYPES) == []
    assert key_hints(config | {"policy": {"megatron_cfg": None, "generation": None}}, TYPES) == []


def test_types_of_blocks_are_nemo_rls_where_it_has_them(monkeypatch):
    name = "nemo_rl.models.generation.vllm.config"
    module = ModuleType(name)
    for parent in ("nemo_rl", "nemo_rl.models", "nemo_rl.models.generation", "nemo_rl.models.generation.vllm"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    assert config_types(Master) == {"": Master}
    monkeypatch.setattr(module, "VllmConfig", VllmConfig, raising=False)
    assert config_types(Master) == TYPES
