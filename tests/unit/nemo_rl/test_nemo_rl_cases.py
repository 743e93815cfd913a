"""Every case that GPUs run on NeMo-RL is legal: NeMo-RL reads it, and it holds together with its `qarl:` block."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from support.nemo_rl import installed

# isort: split
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers

from qarl_nemo.config import ConfigError
from qarl_nemo.nemo_rl.config import apply_qarl
from support.nemo_rl.cases import CASES, RECIPE, overrides

# As tools/make/arithmetic_model.py makes them.
SHAPES = {
    "tiny": {"hidden_size": 512, "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 256},
    "1b": {"hidden_size": 1024, "num_hidden_layers": 16, "num_experts": 32, "moe_intermediate_size": 512},
    "dense": {"hidden_size": 512, "num_hidden_layers": 4},
}
STARTS = [(name, index) for name, case in CASES.items() for index in range(len(case.starts))]


def read(name: str, index: int, folder: Path, *more: str) -> Any:
    """Read a start's config as the launchers do."""
    case = CASES[name]
    shape = SHAPES[case.model]
    (folder / "model").mkdir()
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"intermediate_size": 2 * shape["hidden_size"], "vocab_size": 64, "num_experts_per_tok": 2}
    config = {"model_type": "qwen3_moe" if "num_experts" in shape else "qwen2"} | sizes | heads | shape
    (folder / "model" / "config.json").write_text(json.dumps(config))
    for name in ("train.jsonl", "val.jsonl"):
        (folder / name).write_text('{"input": "1 + 1 = ?", "output": "2"}\n')
    register_omegaconf_resolvers()
    own = overrides(case, case.starts[index], folder, folder)
    config = parse_hydra_overrides(load_config(RECIPE), [*own, *more])
    return MasterConfig(**OmegaConf.to_container(config, resolve=True))


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.setenv("NEMO_RL_ROOT", str(Path(installed.nemo_rl.__file__).parents[1]))


@pytest.mark.parametrize(("name", "index"), STARTS)
def test_a_case_is_legal(name, index, tmp_path):
    case, config = CASES[name], read(name, index, tmp_path)
    start, policy = case.starts[index], config.policy
    if start.executes is not None:
        qarl = apply_qarl(config)
        assert qarl.format == start.rollouts
        assert start.executes.startswith(qarl.format if qarl.alignment == "aligned" else "bf16")
        assert all(target in start.executes for target in qarl.targets)
    megatron, engine = policy["megatron_cfg"], policy["generation"]["vllm_cfg"]
    model_parallel = megatron["tensor_model_parallel_size"] * megatron["context_parallel_size"]
    responses = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    data_parallel = case.num_learners // model_parallel
    assert case.num_learners == data_parallel * model_parallel
    assert case.num_learners % megatron["expert_model_parallel_size"] == 0
    assert responses % policy["train_global_batch_size"] == 0
    assert policy["train_global_batch_size"] % (policy["train_micro_batch_size"] * data_parallel) == 0
    # NeMo-RL asserts it when the first batch is packed.
    pieces = 2 * megatron["context_parallel_size"] if megatron["context_parallel_size"] > 1 else 1
    pieces *= megatron["tensor_model_parallel_size"]
    assert policy["make_sequence_length_divisible_by"] % pieces == 0
    assert megatron["sequence_parallel"] == (megatron["tensor_model_parallel_size"] > 1)
    separate = policy["generation"]["colocated"]["resources"]["gpus_per_node"] or 0
    assert case.gpus == case.num_learners + separate
    engines = separate or case.gpus
    assert engines % engine["tensor_parallel_size"] == 0
    assert config.grpo.max_val_samples % config.grpo.val_batch_size == 0
    assert (case.validates or 0) == config.grpo.val_period


def test_an_illegal_one_is_refused(tmp_path):
    config = read("ep2", 0, tmp_path, "policy.generation.vllm_cfg.kv_cache_dtype=fp8")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8"):
        apply_qarl(config)
