"""What is said when a run starts: refusals before anything is written or trained, and runs with nothing left to do."""

import shutil
import sys

import pytest
import torch

from qarl_nemo.files import FileError, exclusive
from qarl_nemo.train import preflight
from qarl_nemo.train.gpu_pool import SHARE
from qarl_nemo.train.run import LOCK_FILE, _ways_to_need_less, train_run
from support.runs import make_config, read_metrics, train

OFF = {"enabled": False}


@pytest.mark.parametrize("checkpointing", [OFF, {"enabled": True}], ids=["without", "with checkpoints"])
def test_a_complete_run_is_left_alone(checkpointing, tmp_path, capsys):
    blocks = {"grpo": {"max_num_steps": 1}, "checkpointing": checkpointing, "run": {"name": "demo [w4a16][/mlp]"}}
    train_run(make_config(tmp_path, **blocks))
    before = (tmp_path / "metrics.jsonl").read_text()
    assert "already complete" not in capsys.readouterr().out
    assert train_run(make_config(tmp_path, **blocks)) is None
    assert f"demo [w4a16][/mlp]: already complete, 1 steps in {tmp_path}" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_complete_run_deletes_what_it_had_not_when_it_was_killed(tmp_path):
    """A kill after the last checkpoint's rename left older ones, or half of one, for good."""
    blocks = {"grpo": {"max_num_steps": 2}, "checkpointing": {"save_period": 1, "keep_last": 1}}
    train_run(make_config(tmp_path, **blocks))
    last = tmp_path / "checkpoints" / "step_000002"
    shutil.copytree(last, last.with_name("step_000001"))
    last.with_name("step_000000.deleted").mkdir()
    assert train_run(make_config(tmp_path, **blocks)) is None
    assert list(last.parent.iterdir()) == [last]


def test_a_longer_run_without_checkpoints_is_refused_and_keeps_its_metrics(tmp_path):
    train(tmp_path, grpo={"max_num_steps": 1}, checkpointing=OFF)
    with pytest.raises(FileError, match=r"holds steps 1 to 1 of a run and no checkpoint"):
        train_run(make_config(tmp_path, checkpointing=OFF))
    assert len(read_metrics(tmp_path)) == 1


def test_a_folder_in_use_is_refused(tmp_path):
    with (
        exclusive(tmp_path / LOCK_FILE, "run folder"),
        pytest.raises(FileError, match=r"run folder .* is in use by process \d+ on"),
    ):
        train_run(make_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == []


REFUSED = {
    "targets": ({"qarl": {"targets": ["mlp"]}}, r"targets \['mlp'\] match no module"),
    "rollout only": ({"qarl": {"alignment": "rollout_only", "targets": ["mlp"]}}, "match no module"),
    "shapes": ({"policy": {"model_init": {"moe_intermediate_size": 80}}}, "cannot be stored as w4a16"),
}


@pytest.mark.parametrize(("blocks", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_a_folder_is_made(blocks, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_run(make_config(tmp_path / "run", **blocks))
    assert not (tmp_path / "run").exists()


def test_all_that_keeps_a_run_from_starting_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "run").touch()
    config = make_config(tmp_path / "run", device="cuda", qarl={"targets": ["mlp"]})
    with pytest.raises(ValueError, match=r"^3 problem\(s\), nothing was started:") as raised:
        train_run(config)
    for problem in ("device=cuda, but torch sees no CUDA device", "match no module", "run is no folder"):
        assert problem in str(raised.value)
    # One alone is raised as it is.
    with pytest.raises(ValueError, match=r"^device=cuda, but torch sees no CUDA device"):
        train_run(make_config(tmp_path / "new", device="cuda"))


def test_an_attention_kernel_that_does_not_run_here_is_said_with_the_rest(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = make_config(tmp_path / "run", device="cpu", policy={"attention": "engine"}, qarl={"targets": ["mlp"]})
    _, problems = preflight.check(config)
    assert problems[0].startswith("attention=engine does not run here: ")
    assert "match no module" in problems[1]


def test_a_logger_that_is_not_installed_is_refused_before_the_model_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"logger.wandb.project=p: logging to W&B needs the package wandb: pip"):
        preflight.prepare(make_config(tmp_path / "run", logger={"wandb": {"project": "p"}}))
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_is_refused_before_a_folder_is_made(monkeypatch, tmp_path):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(FileError, match=r"room for 3 checkpoints of \d.* needs .* MB and its disk has 1 kB free"):
        train_run(make_config(tmp_path / "run", checkpointing={"keep_last": 2}))
    assert not (tmp_path / "run").exists()


def test_a_run_that_keeps_fewer_checkpoints_than_it_has_needs_room_for_the_next(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "checkpoint_steps", lambda _: [1, 2, 3, 4, 5])
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    config = make_config(tmp_path, checkpointing={"keep_last": 1})
    with pytest.raises(FileError, match=r"room for 1 checkpoints of \d"):
        train_run(config)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(precision, optimizer, tmp_path):
    settings = {"_override_": True, "name": optimizer, "lr": 1e-4}
    policy = {"precision": precision, "optimizer": settings, "warm_start": {"steps": 0}}
    trainer = train_run(make_config(tmp_path, policy=policy, grpo={"max_num_steps": 1}))
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoints" / "step_000001").rglob("*"))
    # Whoever may read the settings may read the weights.
    assert len({path.stat().st_mode for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}) == 1
    # Beside them lie a tokenizer and the headers of each tensor.
    assert 0.9 * written < trainer.prepared.checkpoint_bytes < written


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            {},
            "policy.train_micro_batch_size below 8; policy.logprob_batch_size below 16; "
            "policy.sequence_packing.enabled=true, which bounds tokens and not responses; "
            "policy.activation_checkpointing=true",
        ),
        (
            {"sequence_packing": {"enabled": True, "train_mb_tokens": 100}, "activation_checkpointing": True},
            "policy.sequence_packing.train_mb_tokens below 100; policy.sequence_packing.logprob_mb_tokens below 32768",
        ),
    ],
)
def test_a_gpu_without_memory_is_an_error_that_says_what_needs_less(policy, said, tmp_path):
    def too_large(config, model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 1")

    with pytest.raises(RuntimeError) as raised:
        train_run(make_config(tmp_path, policy=policy | {"warm_start": {"steps": 0}}), too_large)
    assert str(raised.value) == f"CUDA out of memory. Tried to allocate 2.50 GiB. To need less: {said}"


def test_a_run_that_went_out_of_memory_goes_on_with_what_needs_less(tmp_path):
    train(tmp_path, grpo={"max_num_steps": 1})
    less = {"train_micro_batch_size": 4, "logprob_batch_size": 8, "activation_checkpointing": True}
    train(tmp_path, grpo={"max_num_steps": 2}, policy=less | {"sequence_packing": {"enabled": True}})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_run_that_has_begun_keeps_its_cache_and_is_told_so(tmp_path):
    rollout = {"engine": "vllm", "max_model_len": 64, "kv_cache_gib": 3}
    config = make_config(tmp_path, device="auto", rollout=rollout)
    assert "rollout.kv_cache_gib below 3" in _ways_to_need_less(config)
    (tmp_path / "checkpoints" / "step_000000").mkdir(parents=True)
    assert "rollout.kv_cache_gib below 3 in another run_dir" in _ways_to_need_less(config)


def test_a_run_that_has_too_small_a_share_of_its_gpu_says_so(tmp_path, monkeypatch):
    def too_large(config, model):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setenv(SHARE, str(1 / 3))
    with pytest.raises(RuntimeError, match=r"To need less: .*; fewer runs on a GPU \(--parallel\)$"):
        train_run(make_config(tmp_path, policy={"warm_start": {"steps": 0}}), too_large)
