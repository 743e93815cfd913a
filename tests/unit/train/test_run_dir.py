"""A run's folder: new, the same run's, or refused with every key that differs."""

import os

import pytest
from omegaconf import OmegaConf

from qarl_nemo.config import ConfigError, load_config, validate
from qarl_nemo.files import FileError
from qarl_nemo.train.checkpoint import STATE_FILE, checkpoint_dir
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.file_list import FILE_LIST, file_problems, write_file_list
from qarl_nemo.train.run_dir import inspect_run_dir, is_complete, open_run_dir, read_run_config


def config(run_dir, **blocks) -> LocalConfig:
    base = {"run_dir": str(run_dir), "policy": {"model_init": {}}, "loss_fn": {"objective": "tbpo"}}
    return validate(base | blocks, LocalConfig, source="test")


def write_steps(run_dir, last):
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, last + 1)))


def write_checkpoint(run_dir, step):
    folder = checkpoint_dir(run_dir, step)
    folder.mkdir(parents=True)
    (folder / STATE_FILE).write_text("{}")
    write_file_list(folder)


@pytest.fixture
def begun(tmp_path):
    """The folder of a run with two steps and a checkpoint of the first."""
    open_run_dir(config(tmp_path))
    write_steps(tmp_path, 2)
    write_checkpoint(tmp_path, 1)
    return tmp_path


def test_the_resolved_config_is_written(tmp_path):
    made = config(tmp_path / "a" / "b", qarl={"format": "w4a8"})
    open_run_dir(made)
    assert load_config(tmp_path / "a" / "b" / "config.yaml", [], LocalConfig) == made
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.yaml"]


def test_a_config_that_is_not_whole_is_damage_and_no_other_run(begun):
    (begun / "config.yaml").write_text("")
    for read in (lambda: read_run_config(begun), lambda: inspect_run_dir(config(begun))):
        with pytest.raises(FileError, match=r"config\.yaml is damaged: it lacks qarl and policy"):
            read()


def test_a_template_that_looks_like_a_reference_is_written_as_text(tmp_path):
    made = config(tmp_path, policy={"model_init": {}, "tokenizer": {"chat_template": "${seed} {{ '${x' }}"}})
    open_run_dir(made)
    assert load_config(tmp_path / "config.yaml", [], LocalConfig) == made
    write_steps(tmp_path, 2)
    write_checkpoint(tmp_path, 1)
    assert open_run_dir(made) == 1


def test_the_same_config_may_come_back(begun):
    before = (begun / "config.yaml").read_text()
    assert open_run_dir(config(begun)) == 1
    assert (begun / "config.yaml").read_text() == before


def test_looking_at_a_folder_writes_nothing_and_finds_what_opening_it_would(begun):
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("*")}
    assert inspect_run_dir(config(begun)) == 1
    assert inspect_run_dir(config(begun / "new" / "run")) is None
    with pytest.raises(ConfigError, match="seed: there 0, now 4"):
        inspect_run_dir(config(begun, seed=4))
    assert {path: path.stat().st_mtime_ns for path in begun.rglob("*")} == before


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_is_no_place_for_a_run(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        FileError, match=f"file is no folder, so that .*{name} cannot be a run's; choose another run_dir"
    ):
        open_run_dir(config(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_no_place_for_a_run(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(FileError, match=r"may not be written, so that .*run cannot be a run's; choose another run_dir"):
        inspect_run_dir(config(tmp_path / "run"))


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


def test_keys_that_only_divide_the_work_over_memory_may_differ(begun):
    packing = {"enabled": True, "train_mb_tokens": 9, "logprob_mb_tokens": 8}
    sizes = {"train_micro_batch_size": 7, "logprob_batch_size": 6, "logprob_chunk_size": 5}
    other = config(
        begun,
        policy={"model_init": {}, "sequence_packing": packing, "activation_checkpointing": True, **sizes},
        qarl={"keep_operand": False},
        rollout={"keep_operand": False},
    )
    assert open_run_dir(other) == 1
    assert OmegaConf.load(begun / "config.yaml").policy.train_micro_batch_size == 7


def test_what_decides_which_responses_are_decoded_together_may_not_differ(tmp_path):
    vllm = {"engine": "vllm", "max_model_len": 64}
    open_run_dir(config(tmp_path, rollout=vllm))
    write_steps(tmp_path, 1)
    write_checkpoint(tmp_path, 1)
    with pytest.raises(ConfigError) as raised:
        open_run_dir(config(tmp_path, rollout=vllm | {"batch_size": 8, "kv_cache_gib": 2}))
    assert str(raised.value).splitlines()[1:] == [
        "  rollout.batch_size: there 1024, now 8",
        "  rollout.kv_cache_gib: there 1.0, now 2.0",
    ]


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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", r"metrics.jsonl ends with line 0, but .* contains step 3: lines 1 to 3 are missing"),
        ('{"step": 1}\n{"step": 2}\n', r"ends with line 2, .* lines 3 to 3 are missing"),
        ('{"step": 1}\n{"step": 3}\n', r"metrics.jsonl, line 2: expected the record of step 2, found step 3"),
        ('{"step": 1}\n{"reward": 3}\n', r"line 2 is damaged, or not a run's: step: Field required"),
    ],
)
def test_metrics_that_lack_a_step_of_the_checkpoint_are_refused(lines, message, begun):
    write_checkpoint(begun, 3)
    (begun / "metrics.jsonl").write_text(lines)
    with pytest.raises(FileError, match=message):
        open_run_dir(config(begun))
    assert (begun / "metrics.jsonl").read_text() == lines


def test_metrics_without_a_checkpoint_are_kept_and_the_fix_is_said(tmp_path):
    open_run_dir(config(tmp_path))
    write_steps(tmp_path, 2)
    with pytest.raises(FileError, match=r"holds steps 1 to 2 of a run and no checkpoint .* choose another run_dir="):
        open_run_dir(config(tmp_path))


def test_a_folder_without_its_config_is_refused(begun):
    (begun / "config.yaml").unlink()
    with pytest.raises(FileError, match=r"config.yaml is missing"):
        open_run_dir(config(begun))


def test_a_damaged_newest_checkpoint_is_refused_with_what_is_left(begun):
    write_checkpoint(begun, 2)
    (checkpoint_dir(begun, 2) / STATE_FILE).write_text("[]")
    with pytest.raises(
        FileError, match=r"(?s)step_000002 is not a whole .* go on from step 1\n .*state.json: is damaged"
    ):
        open_run_dir(config(begun))


def test_a_run_is_complete_with_its_last_record_and_checkpoint(begun):
    def complete(steps, **checkpointing):
        return is_complete(config(begun, grpo={"max_num_steps": steps}, checkpointing=checkpointing))

    assert complete(1)
    assert not complete(2)
    assert complete(2, enabled=False)
    assert not complete(3, enabled=False)
    with pytest.raises(ConfigError, match="seed: there 0, now 4"):
        is_complete(config(begun, seed=4, grpo={"max_num_steps": 1}))


def test_a_folder_whose_list_is_missing_is_not_whole(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_file_list(tmp_path)
    assert file_problems(tmp_path, checksums=True) == []
    (tmp_path / FILE_LIST).unlink()
    (problem,) = file_problems(tmp_path, checksums=True)
    assert problem.endswith("is missing; it is written last, so the folder is not whole")
