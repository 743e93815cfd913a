"""A validation that would ask nothing is refused, one that leaves problems out gets a hint, and recipes ask all."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from test_nemo_rl_config import config, problems
from test_nemo_rl_recipes import RECIPES

from qarl_nemo.nemo_rl.checks.data import data_conflicts
from qarl_nemo.nemo_rl.checks.hints import find_hints
from qarl_nemo.nemo_rl.checks.validation import validation_batch_conflicts, validation_hints
from qarl_nemo.nemo_rl.lookup import look_up
from support.files import write_jsonl
from support.nemo_rl.recipes import own_settings

AIME = {"dataset_name": "qarl_nemo.nemo_rl.benchmark.Benchmark", "benchmark": "aime24", "repeat": 16}
MATH = {"dataset_name": "qarl_nemo.nemo_rl.benchmark.Benchmark", "benchmark": "math500"}
GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "after_training.md"


def sizes(most: int, batch: int, **data) -> dict:
    keys = {"grpo.max_val_samples": most, "grpo.val_batch_size": batch, "grpo.val_period": 20}
    return config(**keys, data=data)


def test_a_batch_that_is_larger_than_all_that_is_asked_is_refused():
    (line,) = problems(sizes(256, 512))
    assert line.startswith("grpo.val_batch_size=512: more than grpo.max_val_samples=256")
    assert "set at most 256, or grpo.max_val_samples=512" in line
    assert validation_batch_conflicts(sizes(512, 512)) == []
    # Nothing is validated by these keys.
    assert validation_batch_conflicts(config(**{"grpo.val_batch_size": 512, "grpo.val_period": -1})) == []
    silent = {"grpo.val_period": 0, "grpo.val_at_start": False}
    assert validation_batch_conflicts(config(**{"grpo.val_batch_size": 512}, **silent)) == []
    assert len(validation_batch_conflicts(config(**{"grpo.val_batch_size": 512}, **silent | {"grpo.val_at_end": True})))


def test_a_validation_without_problems_is_refused():
    train = {"data_path": "problems.jsonl"}
    (line,) = validation_batch_conflicts(sizes(512, 512, train=train, validation=None))
    assert line.startswith("data.validation: missing, and no training set has a split_validation_size")
    for data in (
        {"train": train, "validation": MATH},
        {"train": train | {"split_validation_size": 0.1}},
        {"train": train, "default": {"split_validation_size": 0.1}},
    ):
        assert validation_batch_conflicts(sizes(512, 512, **data)) == []
    assert validation_batch_conflicts(sizes(512, 512, train=train) | {"grpo": {"val_period": 0}}) == []


@pytest.mark.parametrize(
    ("sizes", "said"), [((0, 512), "max_val_samples=0"), ((None, 512), "max_val_samples=null"),
                        ((256, 0), "val_batch_size=0"), ((256, None), "val_batch_size=null")]
)  # fmt: skip
def test_sizes_that_cannot_be_divided_are_refused_where_something_is_validated(sizes, said):
    keys = dict(zip(("grpo.max_val_samples", "grpo.val_batch_size"), sizes, strict=True))
    (line,) = problems(config(**keys))
    assert line.startswith(
        f"grpo.{said}: NeMo-RL asks grpo.max_val_samples // grpo.val_batch_size batches; set a whole"
    )
    assert validation_hints(config(**keys)) == []
    assert validation_batch_conflicts(config(**keys, **{"grpo.val_period": 0})) == []


def test_problems_that_are_left_out_are_a_hint_with_what_asks_them_all():
    assert find_hints(sizes(480, 480, validation=AIME)) == []
    (hint,) = find_hints(sizes(256, 256, validation=AIME))
    assert hint == (
        "grpo.max_val_samples=256, grpo.val_batch_size=256: of the 480 prompts of data.validation NeMo-RL asks the "
        "first 256, in whole batches; for all set grpo.max_val_samples=512"
    )
    assert validation_hints(sizes(512, 256, validation=AIME)) == []
    # Sets come one after the other.
    (hint,) = validation_hints(sizes(480, 480, validation=[AIME, MATH]))
    assert "of the 980 prompts" in hint
    assert hint.endswith("grpo.max_val_samples=1440")


def test_a_local_file_has_a_problem_a_line(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"input": str(n), "output": "1"} for n in range(20)]))
    own = {"data_path": path}
    (hint,) = validation_hints(sizes(16, 16, validation=own, default={"dataset_name": "ResponseDataset"}))
    assert "of the 20 prompts" in hint
    (hint,) = validation_hints(sizes(16, 16, validation=AIME | own))
    assert "of the 320 prompts" in hint
    assert validation_hints(sizes(20, 20, validation=own, default={"dataset_name": "ResponseDataset"})) == []


@pytest.mark.parametrize("data", [
    {}, {"validation": None}, {"validation": {"dataset_name": "AIME2024"}},
    {"validation": AIME | {"benchmark": "nothing"}},
    {"validation": {"dataset_name": "ResponseDataset", "data_path": "nowhere.jsonl"}},
    {"validation": {"dataset_name": "ResponseDataset", "data_path": __file__, "split": "train[:5]"}},
    {"validation": AIME, "train": {"split_validation_size": 0.05}},
])  # fmt: skip
def test_where_only_the_data_would_tell_only_incomplete_batches_are_a_hint(data):
    assert validation_hints(sizes(256, 256, **data)) == []
    (hint,) = validation_hints(sizes(500, 256, **data))
    assert "batch_size=256: NeMo-RL asks the first 256" in hint
    assert hint.endswith("grpo.max_val_samples=512")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_asks_all_that_it_names(path):
    settings = own_settings(path)
    assert validation_hints(settings) == validation_batch_conflicts(settings) == []
    if "tiny-moe" in path.stem:
        return
    # Its length is known, so a smaller number of prompts would have been found.
    settings["grpo"]["max_val_samples"] = settings["grpo"]["val_batch_size"] = 256
    (hint,) = validation_hints(settings)
    assert f"of the {1319 if 'coder' in path.stem else 480} prompts" in hint


def test_the_guides_example_asks_all_that_it_names_and_stands_over_a_recipe(tmp_path, monkeypatch):
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    (block,) = (one for one in blocks if look_up(one, "data.validation", None))
    assert len(block["data"]["validation"]) > 1
    assert validation_hints(block) == validation_batch_conflicts(block) == []
    # As NeMo-RL does with the block above a recipe's, which a list would not merge with.
    assert block["data"].pop("_override_") is True
    recipe = own_settings(GUIDE.parents[2] / "examples" / "configs" / "qarl-qwen3-30ba3b-1n8g-megatron-w4a16.yaml")
    assert set(recipe["data"]) <= set(block["data"])
    monkeypatch.setenv("NEMO_RL_ROOT", str(tmp_path))
    merged = OmegaConf.merge({key: value for key, value in recipe.items() if key != "data"}, block)
    assert validation_hints(OmegaConf.to_container(merged)) == []
    # NeMo-RL's recipe below has the environment.
    below = {"env": {"math": {"num_workers": 8}}}
    assert data_conflicts(OmegaConf.to_container(OmegaConf.merge(below, merged))) == []
    with pytest.raises(TypeError, match=r"incompatible container types|Cannot merge DictConfig with ListConfig"):
        OmegaConf.merge(recipe, block)
