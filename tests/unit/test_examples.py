"""The example configs are complete, tell runs apart, and are listed where a reader looks."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from qarl_kernels import FORMAT_NAMES, get_format
from qarl_nemo.config import load_config
from qarl_nemo.losses.config import LossConfig
from qarl_nemo.train.arms import expand_arms
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.vllm.limits import config_problems
from qarl_nemo.train.vllm.shapes import gpu_problems

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = {path.stem: load_config(path, [], LocalConfig) for path in sorted(EXAMPLES.glob("configs/local_*.yaml"))}
OBJECTIVES = [model.model_fields["objective"].default for model in get_args(get_args(LossConfig)[0])]
REAL_MODELS = {
    "Qwen2.5-Coder-0.5B-Instruct": (896, 4864, 14, 64),
    "Qwen2.5-Coder-1.5B-Instruct": (1536, 8960, 12, 128),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_has_a_config(objective):
    assert CONFIGS[f"local_objective_{objective}"].loss_fn.objective == objective


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_format_has_a_config(name):
    qarl = CONFIGS[f"local_format_{name}"].qarl
    fmt = get_format(qarl.format, group_size=qarl.group_size, scale_convention=qarl.scale_convention)
    assert (fmt.name, qarl.alignment) == (name, "none" if name == "bf16" else "aligned")


def test_on_policy_grpo_makes_one_optimizer_step_per_rollout_batch():
    grpo = CONFIGS["local_objective_on_policy_grpo"].grpo
    assert grpo.train_global_batch_size == grpo.num_prompts_per_step * grpo.num_generations_per_prompt


@pytest.mark.parametrize("stem", [stem for stem, config in CONFIGS.items() if config.compare])
def test_every_arm_is_legal(stem):
    compare = CONFIGS[stem].compare
    assert len(expand_arms(CONFIGS[stem], stem)) == len(compare.arms) * len(compare.seeds)


@pytest.mark.parametrize("stem", [stem for stem in CONFIGS if stem.startswith(("local_gsm8k", "local_math"))])
def test_vllm_samples_in_every_arm_of_a_real_model(stem):
    config = CONFIGS[stem]
    # The shapes of Qwen2.5-Coder of 0.5B and 1.5B, on a Hopper GPU.
    hidden, width, heads, head_dim = REAL_MODELS[config.policy.model_path.name]
    heads = {"num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": head_dim}
    model = SimpleNamespace(hidden_size=hidden, intermediate_size=width, **heads)
    for run in expand_arms(config, stem) if config.compare else [config]:
        assert run.rollout.engine == "vllm", run.run.name
        assert config_problems(run, "cuda") == [], run.run.name
        assert gpu_problems(run.qarl.served_format, run.qarl.targets, model, (9, 0)) == [], run.run.name


def test_no_two_configs_share_a_folder_or_a_name():
    assert {stem: str(config.run_dir) for stem, config in CONFIGS.items()} == {stem: f"runs/{stem}" for stem in CONFIGS}
    assert len({config.run.name for config in CONFIGS.values()}) == len(CONFIGS)


def test_the_readme_lists_every_config():
    listed = set()
    for row in re.findall(r"^\| (`local_.*?) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE):
        first, *suffixes = re.findall(r"`([\w.]+)`", row)
        listed |= {first, *(first.replace(".yaml", f"{suffix}.yaml") for suffix in suffixes)}
    assert listed >= {f"{stem}.yaml" for stem in CONFIGS}
