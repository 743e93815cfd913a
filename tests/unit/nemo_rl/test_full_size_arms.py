"""The arms of whole steps, read by NeMo-RL itself, and the copy of it that they run."""

import ast
import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from support.nemo_rl import installed  # noqa: F401

# isort: split
import nemo_rl
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers

NEMO_RL = Path(nemo_rl.__file__).parents[1]


@pytest.fixture
def harness(tools, monkeypatch):
    tools("bench/full_size")
    monkeypatch.setenv("NEMO_RL_ROOT", str(NEMO_RL))
    import arms
    import run
    import tree
    import workloads

    return arms, run, tree, workloads


def test_every_arm_has_a_recipe(harness):
    arms, *_ = harness
    recipes = {arm.recipe for arm in arms.ARMS.values() if arm.recipe}
    files = (arms.REPOSITORY / "examples" / "configs").glob("*-1n8g-megatron-*.yaml")
    assert recipes <= {file.stem.rpartition("megatron-")[2] for file in files}


def test_nemo_rl_takes_every_arm(harness, tmp_path):
    arms, run, _, workloads = harness
    register_omegaconf_resolvers()
    file = tmp_path / "config.yaml"
    for arm, placement in itertools.product(arms.ARMS, ("colocated", "separate_1_1", "asynchronous_1_1")):
        above = arms.settings(arm, placement, workloads.WORKLOADS["b12"], NEMO_RL)
        named = run.files_of(tmp_path, tmp_path / "model", tmp_path / arm, 4)
        file.write_text(yaml.safe_dump(run.merge_mappings(above, named)))
        config = MasterConfig(**OmegaConf.to_container(load_config(file), resolve=True))
        assert config.grpo.async_grpo.enabled == placement.startswith("asynchronous")
        assert config.policy["generation"]["colocated"]["enabled"] == (placement == "colocated")
        assert config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt == 128
        assert config.data["train"]["data_path"].startswith(str(tmp_path))


def test_nemo_rl_reads_the_cap(harness, monkeypatch, tmp_path):
    arms, run, _, workloads = harness
    register_omegaconf_resolvers()
    monkeypatch.setattr(run, "first_gpu_gib", lambda: 140.0)
    above = arms.settings("w4a16", "colocated", workloads.WORKLOADS["8gpu"], NEMO_RL)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(above))
    capped = run.capped(79.0, run.compose(above, NEMO_RL, ()), ours=True)
    config = parse_hydra_overrides(load_config(tmp_path / "config.yaml"), capped)
    said = config.policy.megatron_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF
    assert said == f"expandable_segments:False,per_process_memory_fraction:{69 / 140:.3f}"


def test_the_copy_gives_each_answer_its_length(harness, tmp_path, monkeypatch):
    _, _, tree, _ = harness
    copy = tree.copy_tree(NEMO_RL, tmp_path / "copy")
    changed = {name for name, *_ in tree._CHANGES}
    for name in changed:
        assert (copy / name).read_text() != (NEMO_RL / name).read_text()
        ast.parse((copy / name).read_text())
    registry = (copy / "nemo_rl" / "distributed" / "ray_actor_environment_registry.py").read_text()
    for actor in ("AsyncTrajectoryCollector", "ReplayBuffer"):
        assert f'"nemo_rl.algorithms.async_utils.{actor}": VLLM_EXECUTABLE,' in registry
    import answer_lengths

    (tmp_path / "lengths.json").write_text(json.dumps([[3, 4], [5, 3]]))
    monkeypatch.setenv(answer_lengths.FILE, str(tmp_path / "lengths.json"))
    engines = type("Engines", (), {})()
    batch = BatchedDataDict({"input_ids": torch.zeros(4, 2), "stop_strings": [None] * 4})
    shards = answer_lengths.with_lengths(engines, batch).shard_by_batch_size(2, allow_uneven_shards=True)
    assert [shard[answer_lengths.KEY].tolist() for shard in shards] == [[3, 4], [5, 3]]
