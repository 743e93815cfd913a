"""Recipes, read by NeMo-RL itself."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from test_nemo_rl_recipes import RECIPES, model_folder

from support.nemo_rl import installed  # noqa: F401

# isort: split
import nemo_rl
from nemo_rl.algorithms.grpo import MasterConfig, _get_grpo_save_state
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from nemo_rl.utils.logger import Logger

from qarl_nemo.config import ConfigError
from qarl_nemo.metrics.runs import load_run
from qarl_nemo.nemo_rl.checks.key_hints import config_types, key_hints
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.layout_memory import DEFAULT_GIB
from qarl_nemo.nemo_rl.loss import PREFIX
from qarl_nemo.nemo_rl.recording import completed_steps


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Read a recipe as examples/run_qarl_grpo.py does, its model's config.json at hand."""
    monkeypatch.setenv("NEMO_RL_ROOT", os.path.dirname(os.path.dirname(nemo_rl.__file__)))
    register_omegaconf_resolvers()

    def read_recipe(path) -> MasterConfig:
        config = MasterConfig(**OmegaConf.to_container(load_config(path), resolve=True))
        config.policy["model_name"] = model_folder(config.policy["model_name"], tmp_path)
        # Files that a user makes.
        for dataset in (config.data["train"], config.data["validation"]):
            if "data_path" in dataset:
                dataset["data_path"] = str(tmp_path / "data.jsonl")
        (tmp_path / "data.jsonl").write_text('{"question": "1 + 1 = ?", "answer": "#### 2"}\n')
        return config

    return read_recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nemo_rl_takes_the_recipe(path, read):
    config = read(path)
    # The cards that the recipes are for, whatever this machine has.
    config.qarl["gpu_memory_gib"] = DEFAULT_GIB
    qarl = apply_qarl(config)
    assert config.policy["qarl"]["format"] == qarl.format
    assert config.policy["generation"]["quant_cfg"] == "qarl"
    responses = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    assert responses % config.policy["train_global_batch_size"] == 0


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (("cluster", "gpus_per_node", 4), "expert_model_parallel_size=8"),
        (("policy.megatron_cfg", "expert_model_parallel_size", 3), "expert_model_parallel_size=3"),
    ],
)
def test_ranks_that_the_gpus_cannot_be_are_refused(override, named, read):
    config = read(next(path for path in RECIPES if "30ba3b-1n8g-megatron-w4a16" in path.stem))
    dotted, key, value = override
    first, *rest = dotted.split(".")
    block = getattr(config, first)
    for part in rest:
        block = block[part]
    block[key] = value
    with pytest.raises(ConfigError, match=named):
        apply_qarl(config)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_no_key_that_looks_misspelt(path, read):
    values = read(path).model_dump()
    assert key_hints(values, config_types(MasterConfig)) == []
    values["policy"]["generation"]["vllm_cfg"]["gpu_memory_utilisation"] = 0.6
    (line,) = key_hints(values, config_types(MasterConfig))
    assert line.endswith("did you mean gpu_memory_utilization?")


def test_a_recipe_that_quantizes_twice_is_refused(read):
    config = read(RECIPES[0])
    config.policy["generation"]["vllm_cfg"]["precision"] = "fp8"
    with pytest.raises(ConfigError, match=r"vllm_cfg\.precision=fp8"):
        apply_qarl(config)


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = RECIPES[0].parents[1] / "run_qarl_grpo.py"
    recipe = RECIPES[0].with_name("qarl-tiny-moe-1n1g-megatron-w4a16.yaml")
    command = [sys.executable, str(launcher), "--config", str(recipe), "--check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_launcher_checks_a_recipe_without_starting_ray(tmp_path):
    model = f"policy.model_name={tmp_path}"
    shapes = {"model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 256, "moe_intermediate_size": 256,
              "num_experts": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
              "num_hidden_layers": 2, "vocab_size": 64, "num_experts_per_tok": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    (tmp_path / "data.jsonl").write_text('{"input": "1 + 1 = ?", "output": "2"}\n')
    data = [f"data.{key}.data_path={tmp_path / 'data.jsonl'}" for key in ("train", "validation")]
    right = launch(model, *data)
    assert right.returncode == 0, right.stderr
    assert "rollouts as w4a16 in experts; the learner executes the same" in right.stdout
    assert "1 (1 node(s) of 1), shared by learner and engines" in right.stdout
    assert "command: python " in right.stdout
    assert "files that this package builds on" not in right.stdout
    wrong = launch(model, *data, "policy.precision=float32", "++policy.generation.vllm_kwargs.moe_backend=triton")
    assert wrong.returncode == 1
    assert "3 conflict(s)" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_what_nemo_rls_logger_writes_is_a_run(tmp_path):
    backends = {f"{name}_enabled": name == "tensorboard" for name in ("wandb", "swanlab", "tensorboard", "mlflow")}
    logger = Logger(backends | {"log_dir": str(tmp_path), "tensorboard": {}, "monitor_gpus": False})
    responses = {
        "content": ["user: 1+1?", "user: 2+2?"],
        "rewards": [1.0, 0.0],
        "token_ids": [[5, 6, 7], [5, 6, 7]],
        "token_loss_mask": [[0, 1, 1], [0, 1, 0]],
        "sample_loss_mask": [1.0, 1.0],
        "advantages": torch.tensor([[1.0] * 3, [-1.0] * 3]).tolist(),
        "generation_logprobs": [[0.0, -1.0, -2.0], [0.0, -1.0, 0.0]],
        "prev_logprobs": [[0.0, -1.1, -2.1], [0.0, -1.0, 0.0]],
    }
    for step in (1, 2):
        logger.log_batched_dict_as_jsonl(dict(responses), f"train_data_step{step}.jsonl")
        logger.log_metrics({"reward": 0.5, f"{PREFIX}abs_gap": 0.01, "histogram/lengths": [1, 2]}, step, prefix="train")
        logger.log_metrics({"total_step_time": 2.0, "generation": 1.0}, step, prefix="timing/train", step_finished=True)
    for backend in logger.loggers:
        backend.writer.close()
    run = load_run(tmp_path)
    assert run.steps.tolist() == [1, 2]
    assert run.column("mismatch/abs_gap_mean") == pytest.approx([0.01, 0.01])
    assert run.column("timing/rollout_s").tolist() == [1.0, 1.0]
    assert run.diagnostics.arrays["seq_mismatch_weight"] == pytest.approx([math.exp(-0.1), 1.0])
    assert [example["response"] for example in run.examples] == responses["content"]


def test_a_resumed_run_goes_on_counting_in_either_loop():
    # What each loop writes into its checkpoints; the synchronous one is in its second epoch of six steps.
    asynchronous, synchronous = ({"current_step": 8}, {"current_step": 2, "total_steps": 8})
    assert completed_steps(_get_grpo_save_state(asynchronous), asynchronous=True) == 8
    assert completed_steps(_get_grpo_save_state(synchronous), asynchronous=False) == 8
    assert completed_steps(_get_grpo_save_state(None), asynchronous=True) == 0
