"""A run that could write no log or checkpoint, or would take no step, is refused before Ray starts."""

import pytest
from test_nemo_rl_config import config, problems

from qarl_nemo.nemo_rl.checks import folders
from qarl_nemo.nemo_rl.checks.folders import folder_conflicts, folder_hints
from qarl_nemo.nemo_rl.model_shapes import tokenizer_conflicts

LOGS, CHECKPOINTS = "logger.log_dir", "checkpointing.checkpoint_dir"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(folders, "first_gpu_gib", lambda: 79.0)


def of(logs, checkpoints, *, enabled=True):
    return {
        "logger": {"log_dir": str(logs)},
        "checkpointing": {"enabled": enabled, "checkpoint_dir": str(checkpoints)},
    }


def test_folders_that_cannot_be_written_are_named_with_the_reason(gpu, tmp_path):
    file = tmp_path / "file"
    file.touch()
    # Nobody makes a folder in /proc, root neither.
    lines = folder_conflicts(of("/proc/logs", file / "a" / "b"))
    assert lines[0].startswith(f"{LOGS}=/proc/logs: nothing can be written in /proc (")
    assert lines[1] == f"{CHECKPOINTS}={file}/a/b: {file} is no folder; set a folder that this user may write"
    assert len(folder_conflicts(of("/proc/logs", file, enabled=False))) == 1
    assert folder_hints(of("/proc/logs", file)) == []
    assert [line.partition("=")[0] for line in problems(config(**{LOGS: "/proc/logs"}))] == [LOGS]


def test_folders_that_can_be_made_are_not_mentioned_and_not_made(gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folder_conflicts(of(tmp_path / "a" / "b", "c/d")) == []
    assert folder_conflicts(of(tmp_path, "${logger.log_dir}")) == []
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_a_mount_may_be_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(folders, "first_gpu_gib", lambda: None)
    file = tmp_path / "file"
    file.touch()
    given = of("/proc/logs", file)
    (hint,) = folder_hints(given)
    assert hint.startswith(f"{LOGS}=/proc/logs: nothing can be written in /proc (")
    assert "This machine has no GPU, so the run is not refused" in hint
    (line,) = folder_conflicts(given)
    assert line.startswith(f"{CHECKPOINTS}={file}: {file} is no folder")


@pytest.mark.parametrize("key", ["grpo.max_num_steps", "grpo.max_num_epochs", "data.max_input_seq_length"])
def test_a_run_takes_a_step_and_reads_a_token(key):
    for value, said in ((0, "set 1 or more"), (-1, "set 1 or more"), (1.5, "not a whole number; set 1 or more")):
        assert f"{key}={value}: {said}" in problems(config(**{key: value}))


def test_a_tokenizer_is_a_folder_or_a_name_on_the_hub(tmp_path):
    for name in ("/nonexistent/tok", str(tmp_path / "none"), "a/b/c"):
        (line,) = problems(config(**{"policy.tokenizer": {"name": name}}))
        assert line.startswith(f"policy.tokenizer.name={name}: no such folder, nor a name on the Hugging Face hub")
    for name in (str(tmp_path), "Qwen/Qwen3-8B", "gpt2", "${policy.model_name}", None):
        assert tokenizer_conflicts({"policy": {"tokenizer": {"name": name}}}) == []
