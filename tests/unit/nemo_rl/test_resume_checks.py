"""What Megatron would refuse, minutes after the start, of a run that goes on from a checkpoint."""

from pathlib import Path

import pytest
from test_nemo_rl_config import config as recipe
from test_nemo_rl_config import problems

from qarl_nemo.config import merge_mappings, write_yaml
from qarl_nemo.nemo_rl.checks.resume import metric_conflicts, resume_conflicts, save_time_conflicts
from qarl_nemo.nemo_rl.lookup import with_value

_OVERRIDE = "policy.megatron_cfg.scheduler.override_opt_param_scheduler"


def config(folder, steps=100, **changes):
    megatron = {"optimizer": {"lr": 1e-6, "min_lr": 1e-6}, "scheduler": {"lr_warmup_iters": 9, "lr_warmup_init": 1e-7}}
    found = {
        "checkpointing": {"enabled": True, "checkpoint_dir": str(folder), "save_optimizer": True},
        "grpo": {"max_num_steps": steps},
        "policy": {"train_global_batch_size": 32, "megatron_cfg": megatron},
    }
    for key, value in changes.items():
        found = with_value(found, key.replace("__", "."), value)
    return found


def save(step, saved, train_iters=100):
    """Write what NeMo-RL writes beside a checkpoint's weights."""
    ran = {"policy": {"megatron_cfg": {"train_iters": train_iters}}}
    folder = Path(saved["checkpointing"]["checkpoint_dir"]) / step
    folder.mkdir(parents=True)
    write_yaml(folder / "config.yaml", merge_mappings(saved, ran))


def test_a_run_that_goes_on_as_it_began_has_no_conflict(tmp_path):
    assert resume_conflicts(config(tmp_path)) == []
    save("step_50", config(tmp_path))
    assert resume_conflicts(config(tmp_path)) == []


def test_every_key_that_moves_the_schedule_is_named_beside_what_it_was(tmp_path):
    save("step_100", config(tmp_path))
    # By number, and what NeMo-RL is still writing is none.
    save("step_99", config(tmp_path, steps=7))
    save("tmp_step_101", config(tmp_path, steps=7))
    changes = {
        "policy__train_global_batch_size": 64,
        "policy__megatron_cfg__scheduler__lr_warmup_iters": 5,
        # Megatron does not look at this one.
        "policy__megatron_cfg__scheduler__lr_warmup_init": 0.0,
    }
    (line,) = resume_conflicts(config(tmp_path, steps=300, **changes))
    assert f"checkpoint_dir={tmp_path}: the run goes on from step_100," in line
    assert "grpo.max_num_steps=300 (100 there), policy.train_global_batch_size=64 (32 there)" in line
    assert "scheduler.lr_warmup_iters=5 (9 there); set these back, ++" in line
    assert "lr_warmup_init" not in line
    assert f"++{_OVERRIDE}=true" in line


@pytest.mark.parametrize("override", [None, True])
def test_no_key_lets_megatron_find_an_optimizer_by_another_learning_rate(tmp_path, override):
    save("step_100", config(tmp_path))
    changes = {"policy__megatron_cfg__optimizer__lr": 5e-7, "qarl__update_aware_scale": 1.5}
    (line,) = resume_conflicts(with_value(config(tmp_path, **changes), _OVERRIDE, override))
    assert f"checkpoint_dir={tmp_path}: the run goes on from step_100, whose optimizer Megatron cannot load" in line
    assert "optimizer.lr=5e-07 (1e-06 there), qarl.update_aware_scale=1.5 (None there); set them back, or" in line
    assert "qarl convert --format bf16" in line


@pytest.mark.parametrize("key", [_OVERRIDE, "policy.megatron_cfg.scheduler.use_checkpoint_opt_param_scheduler"])
def test_a_key_that_says_which_schedule_counts_settles_it(tmp_path, key):
    save("step_100", config(tmp_path))
    assert resume_conflicts(with_value(config(tmp_path, steps=300), key, True)) == []


def test_a_schedule_that_the_data_ended_may_have_more_steps(tmp_path):
    save("step_40", config(tmp_path, steps=100), train_iters=40)
    assert resume_conflicts(config(tmp_path, steps=60)) == []
    (line,) = resume_conflicts(config(tmp_path, steps=30))
    assert "grpo.max_num_steps=30 (100 there)" in line


def test_nothing_is_said_of_checkpoints_that_hold_no_schedule(tmp_path):
    save("step_100", config(tmp_path, checkpointing__save_optimizer=False))
    assert resume_conflicts(config(tmp_path, steps=300)) == []
    (tmp_path / "step_101").mkdir()
    assert resume_conflicts(config(tmp_path, steps=300)) == []
    for text in ("grpo: [", "grpo: {}"):
        (tmp_path / "step_101" / "config.yaml").write_text(text)
        assert resume_conflicts(config(tmp_path, steps=300)) == []


def test_the_launcher_refuses_it(tmp_path):
    save("step_2", config(tmp_path, steps=2), train_iters=2)
    found = problems(recipe(**{"checkpointing.checkpoint_dir": str(tmp_path), "grpo.max_num_steps": 4}))
    assert [line for line in found if "the run goes on from step_2" in line]


def test_a_run_that_its_data_ended_goes_on_for_no_further_epoch(tmp_path):
    """NeMo-RL counts the schedule's steps by what the data lasts for, and Megatron compares them."""
    epochs = {"grpo__max_num_epochs": 1, "grpo__num_prompts_per_step": 16}
    save("step_90", config(tmp_path, steps=1000, **epochs), train_iters=90)
    assert resume_conflicts(config(tmp_path, steps=1000, **epochs)) == []
    (line,) = resume_conflicts(config(tmp_path, steps=1000, **epochs | {"grpo__max_num_epochs": 2}))
    assert "whose schedule Megatron lets no run leave: grpo.max_num_epochs=2 (1 there); set these back" in line
    (line,) = resume_conflicts(config(tmp_path, steps=1000, **epochs | {"grpo__num_prompts_per_step": 8}))
    assert "grpo.num_prompts_per_step=8 (16 there)" in line
    # As many steps as it had.
    assert resume_conflicts(config(tmp_path, steps=90, **epochs | {"grpo__max_num_epochs": 2})) == []


def test_a_checkpoint_is_kept_by_what_a_validation_measures():
    saves = {"checkpointing.enabled": True, "checkpointing.metric_name": "val:acc"}
    (line,) = problems(recipe(**saves))
    assert line.startswith("checkpointing.metric_name=val:acc: NeMo-RL ends at its first checkpoint after a validation")
    assert line.endswith("set val:accuracy or val:avg_length, or null to keep the newest ones")
    saves["checkpointing.metric_name"] = "val:pass_k"
    assert len(metric_conflicts(recipe(**saves))) == 1
    assert metric_conflicts(recipe(**saves | {"grpo.val_num_generations_per_prompt": 4})) == []


@pytest.mark.parametrize("name", ["val_reward", "val:", "test:accuracy"])
def test_a_metric_that_no_checkpoint_could_be_kept_by_is_refused(name):
    saves = {"checkpointing.enabled": True, "checkpointing.metric_name": name}
    (line,) = problems(recipe(**saves))
    assert line.startswith(f"checkpointing.metric_name={name}: NeMo-RL ends at its first checkpoint unless")
    assert line.endswith("set val:accuracy, or null to keep the newest ones")
    (line,) = metric_conflicts(recipe(**saves | {"checkpointing.metric_name": "val:reward"}))
    assert "NeMo-RL calls a validation's mean reward accuracy" in line
    for others in ("val:accuracy", "train:reward", None):
        assert metric_conflicts(recipe(**saves | {"checkpointing.metric_name": others})) == []
    # Nothing is saved.
    assert metric_conflicts(recipe(**saves | {"checkpointing.enabled": False})) == []


@pytest.mark.parametrize(("time", "said"), [("03:45:00", "03:45:00"), ("3h", "3h"), (13500, "13500"), ("", "")])
def test_the_time_to_save_by_is_one_that_nemo_rl_reads(time, said):
    key = "checkpointing.checkpoint_must_save_by"
    # NeMo-RL reads it without checkpoints, too.
    for enabled in (True, False):
        (line,) = problems(recipe(**{"checkpointing.enabled": enabled, key: time}))
        assert line.startswith(f"{key}={said}: not days, hours, minutes and seconds as DD:HH:MM:SS; set e.g. ")
    for legal in ("00:03:45:00", "1:0:0:0", None):
        assert save_time_conflicts(recipe(**{key: legal})) == []
