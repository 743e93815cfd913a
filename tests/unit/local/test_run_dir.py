"""A run's folder: new, the same run's, or refused with every key that differs."""

import pytest
from omegaconf import OmegaConf

from qarl_nemo.config import ConfigError, load_config, validate
from qarl_nemo.local.config import LocalConfig
from qarl_nemo.local.run_dir import open_run_dir


def config(run_dir, **blocks) -> LocalConfig:
    base = {"run_dir": str(run_dir), "policy": {"model_init": {}}, "loss_fn": {"objective": "tbpo"}}
    return validate(base | blocks, LocalConfig, source="test")


@pytest.fixture
def begun(tmp_path):
    """The folder of a run that has written its first step."""
    open_run_dir(config(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    return tmp_path


def test_the_resolved_config_is_written(tmp_path):
    made = config(tmp_path / "a" / "b", qarl={"format": "w4a8"})
    open_run_dir(made)
    assert load_config(tmp_path / "a" / "b" / "config.yaml", [], LocalConfig) == made
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.yaml"]


def test_the_same_config_may_come_back(begun):
    before = (begun / "config.yaml").read_text()
    open_run_dir(config(begun))
    assert (begun / "config.yaml").read_text() == before


def test_keys_that_change_no_number_may_differ(begun):
    longer = config(
        begun,
        grpo={"max_num_steps": 7},
        policy={"model_init": {}, "max_skipped_steps": 9},
        num_threads=3,
        checkpointing={"save_period": 1, "keep_last": 9},
        logger={"diagnostics_period": 3, "wandb": {"project": "p"}},
    )
    open_run_dir(longer)
    assert OmegaConf.load(begun / "config.yaml").grpo.max_num_steps == 7


def test_another_config_is_refused_naming_every_key_and_both_values(begun):
    other = config(
        begun,
        seed=4,
        qarl={"targets": ["experts", "attention"]},
        loss_fn={"objective": "gspo"},
        policy={"model_path": "m"},
        grpo={"val_period": 1, "max_num_steps": 3},
    )
    before = (begun / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="choose another run_dir=") as raised:
        open_run_dir(other)
    lines = str(raised.value).splitlines()[1:]
    for line in (
        "  seed: there 0, now 4",
        "  qarl.targets: there ['experts'], now ['experts', 'attention']",
        "  loss_fn.objective: there 'tbpo', now 'gspo'",
        "  loss_fn.mismatch_cap: there 2.0, now None",
        "  policy.model_path: there None, now 'm'",
        "  policy.model_init.hidden_size: there 128, now None",
        "  grpo.val_period: there 50, now 1",
    ):
        assert line in lines
    assert "max_num_steps" not in str(raised.value)
    assert (begun / "config.yaml").read_text() == before


def test_a_checkpoint_alone_makes_a_folder_a_runs_own(tmp_path):
    open_run_dir(config(tmp_path))
    (tmp_path / "checkpoints" / "step_000000").mkdir(parents=True)
    with pytest.raises(ConfigError, match="seed: there 0, now 4"):
        open_run_dir(config(tmp_path, seed=4))


def test_a_run_that_failed_before_its_first_result_can_be_corrected(tmp_path):
    open_run_dir(config(tmp_path, policy={"model_path": "mistyped"}))
    open_run_dir(config(tmp_path, policy={"model_path": "right"}))
    assert OmegaConf.load(tmp_path / "config.yaml").policy.model_path == "right"
