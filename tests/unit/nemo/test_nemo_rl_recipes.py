"""The recipes say only what differs from NeMo-RL's own, hold together with their `qarl:` block, and are listed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from qarl_nemo.config import merge_mappings
from qarl_nemo.memory import GIB, OVERHEAD_BYTES, Learner, ModelSize, Parallelism, rank_memory, refit_bytes
from qarl_nemo.nemo.rl.config import apply_qarl

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPES = sorted(path for path in (EXAMPLES / "configs").glob("qarl-*.yaml") if path.stem != "qarl-paper")
NEMO_RL = "${oc.env:NEMO_RL_ROOT}/examples/configs/"
KEYS = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# The public shapes of recipes' models, where examples/ has no config.json of them.
DENSE = {
    "Qwen/Qwen3-8B-Base": ("qwen3", 4096, 12288, 32, 8, 128),
    "Qwen/Qwen2.5-Math-7B": ("qwen2", 3584, 18944, 28, 4, 128),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", 1536, 8960, 12, 2, 128),
}


def own_settings(path: Path) -> dict[str, Any]:
    """What our files of a recipe say, without NeMo-RL's below them."""
    own = yaml.safe_load(path.read_text())
    parents = own.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if not parent.startswith(NEMO_RL):
            merged = merge_mappings(merged, own_settings(path.parent / parent))
    return merge_mappings(merged, own)


def model_folder(name: str, folder: Path) -> str:
    """Where the config.json of a recipe's model is; the one-GPU recipe's is made first, and has none here."""
    if name == "Qwen/Qwen3-30B-A3B-Base":
        return str(EXAMPLES / "models" / "qwen3-30b-a3b")
    if name not in DENSE:
        return name
    (folder / "config.json").write_text(json.dumps(dict(zip(KEYS, DENSE[name], strict=True))))
    return str(folder)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_no_conflicts_with_its_qarl_block(path, tmp_path):
    settings = own_settings(path)
    name = settings["policy"]["model_name"]
    settings["policy"]["model_name"] = model_folder(name, tmp_path)
    assert "tiny_moe" in name or settings["policy"]["model_name"] != name
    qarl = apply_qarl(settings)
    named = path.stem.rpartition("megatron-")[2].replace("-", "_")
    assert qarl.format == named
    assert qarl.alignment == ("none" if named == "bf16" else "aligned")


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
        format=None if qarl["format"] == "bf16" else qarl["format"],
        attention="attention" in qarl["targets"],
        keep_operand=qarl["keep_operand"],
        optimizer="muon",
        gradient_bytes=2,
        tokens=settings["policy"]["sequence_packing"]["train_mb_tokens"],
        recompute="full",
    )
    model = ModelSize.read(EXAMPLES / "models" / "qwen3-30b-a3b")
    needed = rank_memory(model, ranks, learner)
    stated = f"{needed.static_bytes / GIB:.0f}, {needed.peak_bytes / GIB:.0f}"
    row = next(line for line in (EXAMPLES / "README.md").read_text().splitlines() if f"`{path.name}`" in line)
    assert f"| {stated} |" in row, stated
    assert needed.fits(79 * GIB)
    engine_tp = settings["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"]
    refit = refit_bytes(model, ranks, learner, engine_tp, layerwise=True)
    assert refit + 2 * OVERHEAD_BYTES <= 79 * GIB
