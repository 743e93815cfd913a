"""The recipes say only what differs from NeMo-RL's own, hold together with their `qarl:` block, and are listed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from qarl_nemo.config import ConfigError, merge_mappings
from qarl_nemo.memory import (
    ASLEEP_BYTES,
    GIB,
    OVERHEAD_BYTES,
    Learner,
    ModelSize,
    Parallelism,
    rank_memory,
    refit_bytes,
)
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.launch_summary import launch_summary
from qarl_nemo.nemo_rl.layout_memory import DEFAULT_GIB
from qarl_nemo.nemo_rl.lookup import look_up
from support.documents import commands
from support.nemo_rl.recipes import BELOW, NEMO_RL, own_settings

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPES = sorted(path for path in (EXAMPLES / "configs").glob("qarl-*.yaml") if path.stem != "qarl-paper")
KEYS = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "vocab_size")  # fmt: skip
# The public shapes of recipes' models, where examples/ has no config.json of them.
DENSE = {
    "Qwen3-8B-Base": ("qwen3", 4096, 12288, 32, 8, 128, 36, 151936),
    "Qwen2.5-Math-7B": ("qwen2", 3584, 18944, 28, 4, 128, 28, 152064),
    "Qwen2.5-Math-1.5B": ("qwen2", 1536, 8960, 12, 2, 128, 28, 151936),
    "Qwen2.5-Coder-0.5B-Instruct": ("qwen2", 896, 4864, 14, 2, 64, 24, 151936),
}


# Keys that say how is trained, and not how fast.
METHOD = ("grpo", "loss_fn", "data", "policy.train_global_batch_size", "policy.max_total_sequence_length",
          "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler",
          "policy.generation.max_new_tokens")  # fmt: skip
PAPER = own_settings(EXAMPLES / "configs" / "qarl-paper.yaml")


def arm(path: Path) -> tuple[str, str]:
    """The alignment and the format that a recipe's name says."""
    named = path.stem.rpartition("megatron-")[2].replace("-", "_")
    fmt = named.removeprefix("rollout_only_").removeprefix("qurl_").removeprefix("progressive_").removeprefix("nested_")
    if named.startswith("rollout_only_"):
        return "rollout_only", fmt
    return ("none" if fmt == "bf16" else "aligned"), fmt


def model_folder(name: str, folder: Path) -> str:
    """Where the config.json of a recipe's model is; the one-GPU recipe's is made first, and has none here."""
    if name == "Qwen/Qwen3-30B-A3B-Base":
        return str(EXAMPLES / "models" / "qwen3-30b-a3b")
    shapes = DENSE.get(name.rpartition("/")[2])
    if shapes is None:
        return name
    (folder / "config.json").write_text(json.dumps(dict(zip(KEYS, shapes, strict=True))))
    return str(folder)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_no_conflicts_with_its_qarl_block(path, tmp_path):
    settings = own_settings(path)
    name = settings["policy"]["model_name"]
    settings["policy"]["model_name"] = model_folder(name, tmp_path)
    assert "tiny_moe" in name or settings["policy"]["model_name"] != name
    qarl = apply_qarl(settings)
    alignment, named = arm(path)
    assert (qarl.alignment, qarl.format) == (alignment, named)
    assert (qarl.nested_in is not None) == ("-nested-" in path.stem)
    unaligned = "qurl_acr" if "qurl" in path.stem else "gspo"
    assert qarl.objective.objective == ("tbpo" if alignment == "aligned" else unaligned)
    # The one-GPU recipe's responses are short: its bands say why they are others.
    if "tiny_moe" not in name:
        assert qarl.objective == type(qarl.objective)()


def on_eight_gpus(path) -> dict[str, Any]:
    """A full-size recipe with what it inherits, on the GPUs of 80 GB that it is for."""
    settings = merge_mappings(BELOW, own_settings(path))
    settings["policy"]["model_name"] = str(EXAMPLES / "models" / "qwen3-30b-a3b")
    return merge_mappings(settings, {"qarl": {"gpu_memory_gib": DEFAULT_GIB}})


@pytest.mark.parametrize("path", [path for path in RECIPES if "30ba3b-1n8g" in path.stem], ids=lambda path: path.stem)
def test_a_full_size_recipe_fits_the_node_that_it_is_for(path):
    settings = on_eight_gpus(path)
    said = launch_summary(settings, apply_qarl(settings), ["run"], None)
    assert "512 prompts x 8 responses each, 8 optimizer step(s) of 512" in said
    assert "8 ranks: TP2 EP8, 4 data parallel" in said
    assert "go to the host and back in each step" in said
    # GPUs of half the size are too small, which the same check says.
    with pytest.raises(ConfigError, match="memory: "):
        apply_qarl(merge_mappings(on_eight_gpus(path), {"qarl": {"gpu_memory_gib": 40.0}}))


def scaled() -> list[tuple[str, list[str]]]:
    """The recipes that the guide starts with fewer GPUs and layers, and the overrides."""
    found = []
    for words in commands(EXAMPLES.parent / "docs" / "guide" / "nemo_rl.md"):
        if any("num_hidden_layers" in word for word in words):
            overrides = [word.lstrip("+") for word in words if "=" in word]
            found.append((words[words.index("--config") + 1], overrides))
    return found


@pytest.mark.parametrize(("recipe", "overrides"), scaled(), ids=lambda each: each if isinstance(each, str) else "")
def test_a_full_size_recipe_starts_on_fewer_gpus_by_overrides_alone(recipe, overrides):
    settings = OmegaConf.merge(on_eight_gpus(EXAMPLES.parent / recipe), OmegaConf.from_dotlist(overrides))
    settings["data"] = {}
    values = OmegaConf.to_container(settings, resolve=True)
    apply_qarl(values)
    assert values["cluster"]["gpus_per_node"] in (1, 2)


def test_the_papers_three_arms_of_its_moe_are_trained_alike():
    """BF16 with GSPO, int4 rollouts alone with GSPO, QaRL with TBPO; all else of the method is shared."""
    arms = {}
    paths = (path for path in RECIPES if "qwen3-30ba3b-1n8g" in path.stem and path.stem.endswith(("bf16", "w4a16")))
    for path in paths:
        settings = own_settings(path)
        arms[arm(path)] = settings["qarl"].get("objective", {}).get("objective")
        assert {key: look_up(settings, key) for key in METHOD} == {key: look_up(PAPER, key) for key in METHOD}
    assert arms == {("none", "bf16"): "gspo", ("rollout_only", "w4a16"): "gspo", ("aligned", "w4a16"): None}


def test_the_shared_file_has_the_papers_numbers():
    """Appendix B of arXiv 2604.07853; its batches of 512 and 64 count prompts, of 8 responses each."""
    numbers = {
        "grpo.num_prompts_per_step": 512,
        "grpo.num_generations_per_prompt": 8,
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "policy.train_global_batch_size": 64 * 8,
        "policy.max_total_sequence_length": 2048 + 16384,
        "policy.sequence_packing.train_mb_tokens": 22528,
        "policy.generation.max_new_tokens": 16384,
        "policy.megatron_cfg.optimizer.lr": 1e-6,
        "policy.megatron_cfg.optimizer.weight_decay": 0.01,
        "data.max_input_seq_length": 2048,
    }
    assert {key: look_up(PAPER, key) for key in numbers} == numbers
    assert "muon" in look_up(PAPER, "policy.megatron_cfg.optimizer.optimizer")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_on_nemo_rls_own_and_keeps_its_results_apart(path):
    parents, chain = [path.name], []
    while parents:
        parent = parents.pop()
        chain.append(parent)
        if not parent.startswith(NEMO_RL):
            found = yaml.safe_load((path.parent / parent).read_text()).get("defaults", [])
            parents += [found] if isinstance(found, str) else found
    assert any(parent.startswith(NEMO_RL) for parent in chain)
    settings = own_settings(path)
    assert settings["logger"] == {"log_dir": f"logs/{path.stem}", "tensorboard_enabled": True}
    assert settings["checkpointing"]["checkpoint_dir"] == f"results/{path.stem}"


def test_the_readme_lists_every_recipe():
    listed = set(re.findall(r"^\| `(qarl-[\w.-]+\.yaml)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in RECIPES}


@pytest.mark.parametrize("path", [path for path in RECIPES if "30ba3b" in path.stem], ids=lambda path: path.stem)
def test_the_readme_states_the_memory_that_is_computed(path):
    settings = own_settings(path)
    qarl = settings["qarl"]
    # NeMo-RL's recipe below has these ranks, and gradients in BF16.
    ranks = Parallelism(8 * settings["cluster"]["num_nodes"], tp=2, ep=8)
    learner = Learner(
        format=qarl["format"] if arm(path)[0] == "aligned" else "bf16",
        group_size=qarl.get("group_size") or 128,
        targets=tuple(qarl["targets"]),
        keep_operand=qarl["keep_operand"],
        optimizer="muon",
        gradient_bytes=2,
        tokens=settings["policy"]["sequence_packing"]["train_mb_tokens"],
        recompute="full",
        logprob_chunk=settings["policy"]["logprob_chunk_size"],
        nested_in=qarl.get("nested_in"),
    )
    model = ModelSize.read(EXAMPLES / "models" / "qwen3-30b-a3b")
    needed = rank_memory(model, ranks, learner)
    stated = f"{needed.static_bytes / GIB:.0f}, {needed.peak_bytes / GIB:.0f}"
    row = next(line for line in (EXAMPLES / "README.md").read_text().splitlines() if f"`{path.name}`" in line)
    assert f"| {stated} |" in row, stated
    assert needed.peak_bytes + OVERHEAD_BYTES + ASLEEP_BYTES <= 79 * GIB
    engine_tp = settings["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"]
    served = replace(learner, format=qarl["format"])
    refit = refit_bytes(model, ranks, learner, engine_tp, layerwise=True, served=served)
    assert refit + OVERHEAD_BYTES + ASLEEP_BYTES <= 79 * GIB
