"""Checkpoints: whole or not there, the newest few kept, readable by anyone, restored bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_nemo.files import FileError
from qarl_nemo.layers.install import install
from qarl_nemo.train.checkpoint import (
    checkpoint_dir,
    checkpoint_steps,
    newest_checkpoint,
    read_state,
    remove_leftovers,
    save_checkpoint,
)
from qarl_nemo.train.config import AdamWConfig, MuonConfig
from qarl_nemo.train.model import load_checkpoint
from qarl_nemo.train.optimizer import MasterOptimizer
from support.asserts import assert_bitwise_equal
from support.disk import FlushedDisk
from support.engines import PROMPTS, TOKENIZER, make_engine, sample, tiny_model, weights_of

STATE = {"elapsed_s": 1.5, "weight_version": 3}


def save(run_dir, step, engine, *, keep_last=10, state=STATE):
    return save_checkpoint(run_dir, step, engine.learner, TOKENIZER, state, keep_last=keep_last)


def update(engine):
    rollouts = sample(engine, prompts=PROMPTS)
    prev = engine.learner.prev_logprobs(rollouts)
    engine.learner.update(rollouts, prev, torch.tensor([1.0, -1.0, 0.5, -0.5]), [torch.arange(4)])


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.mark.parametrize("optimizer", [AdamWConfig(lr=1e-3), MuonConfig(lr=1e-3)], ids=["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_run_continues_to_the_same_bits(dtype, optimizer, tmp_path):
    engine = make_engine(model=tiny_model(dtype=dtype), optimizer=optimizer)
    update(engine)
    save(tmp_path, 1, engine)
    model, tokenizer = load_checkpoint(checkpoint_dir(tmp_path, 1) / "model", dtype)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    restored = make_engine(model=model, optimizer=optimizer)
    restored.learner.resume(checkpoint_dir(tmp_path, 1), engine.learner.weight_version)
    for continued in (engine, restored):
        continued.report.changes.bump()
        continued.refit()
        update(continued)
    expected = weights_of(engine.model)
    for name, weight in weights_of(restored.model).items():
        assert_bitwise_equal(weight, expected[name])


def test_the_model_folder_is_an_ordinary_hugging_face_checkpoint(engine, tmp_path):
    folder = save(tmp_path, 4, engine) / "model"
    stored = load_file(folder / "model.safetensors")
    # experts have names of their own on disk, as every other tool expects
    gate_up = engine.model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert_bitwise_equal(stored["model.layers.0.mlp.experts.3.up_proj.weight"], gate_up[3, 128:].detach())
    plain = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert {name: tuple(p.shape) for name, p in plain.named_parameters()} == {
        name: tuple(p.shape) for name, p in engine.model.named_parameters()
    }
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).decode([13, 14]) == TOKENIZER.decode([13, 14])
    install(plain, ("experts",), engine.sampler.format)
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        assert_bitwise_equal(plain(input_ids=ids).logits, engine.model(input_ids=ids).logits)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(engine, tmp_path, monkeypatch):
    disk = FlushedDisk(monkeypatch)
    folder = save(tmp_path, 4, engine)
    assert disk.lost[folder] == set()
    assert save(tmp_path, 4, engine, state=STATE | {"elapsed_s": 2.5}) == folder
    assert disk.lost[folder] == set()


def test_no_pickle_comes_in(engine, tmp_path):
    folder = save(tmp_path, 4, engine)
    (folder / "optimizer.pt").unlink()
    torch.save({"num_steps": MasterOptimizer}, folder / "optimizer.pt")
    with pytest.raises(Exception, match=r"Weights only load failed"):
        engine.learner.resume(folder, 3)


def test_state_and_step_are_kept(engine, tmp_path):
    save(tmp_path, 12, engine)
    assert read_state(tmp_path, 12) == {"step": 12, **STATE}
    assert checkpoint_dir(tmp_path, 12).name == "step_000012"


def test_only_the_newest_checkpoints_stay(engine, tmp_path):
    assert checkpoint_steps(tmp_path) == []
    for step in (0, 5, 10, 15):
        save(tmp_path, step, engine, keep_last=2)
    assert checkpoint_steps(tmp_path) == [10, 15]
    save(tmp_path, 1_000_000, engine, keep_last=2)
    assert checkpoint_steps(tmp_path) == [15, 1_000_000]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_checkpoint_cut_short_does_not_count_and_is_written_over(engine, tmp_path):
    save(tmp_path, 5, engine)
    partial = tmp_path / "checkpoints" / "step_000010.partial"
    (partial / "model").mkdir(parents=True)
    (partial / "model" / "stale.safetensors").write_text("half a file")
    assert checkpoint_steps(tmp_path) == [5]
    folder = save(tmp_path, 10, engine)
    assert checkpoint_steps(tmp_path) == [5, 10]
    assert not partial.exists()
    assert not (folder / "model" / "stale.safetensors").exists()


def test_a_failing_save_leaves_the_older_checkpoint_whole(engine, tmp_path):
    save(tmp_path, 5, engine, keep_last=1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 10, engine, keep_last=1, state={"elapsed_s": object()})
    assert checkpoint_steps(tmp_path) == [5]
    assert read_state(tmp_path, 5)["step"] == 5


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_named_as_such(engine, tmp_path, monkeypatch):
    def full(*_):
        # The type and the words of the tokenizers package.
        raise Exception("No space left on device (os error 28)")

    save(tmp_path, 5, engine)
    monkeypatch.setattr(type(TOKENIZER), "save_pretrained", full)
    with pytest.raises(FileError, match=r"step_000010: the checkpoint cannot be written: the disk is full .* goes on"):
        save(tmp_path, 10, engine)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000005"]


def test_a_step_can_be_saved_again(engine, tmp_path):
    save(tmp_path, 5, engine)
    save(tmp_path, 5, engine, state={"elapsed_s": 9.0, "weight_version": 4})
    assert json.loads((checkpoint_dir(tmp_path, 5) / "state.json").read_text())["elapsed_s"] == 9.0


@pytest.mark.parametrize("step", [10, 5], ids=["older", "replaced"])
def test_half_of_a_deleted_checkpoint_does_not_count(engine, tmp_path, monkeypatch, step):
    save(tmp_path, 5, engine)
    killed = RuntimeError("killed")

    def delete_one_file(folder):
        next(path for path in folder.rglob("*") if path.is_file()).unlink()
        raise killed

    monkeypatch.setattr("shutil.rmtree", delete_one_file)
    with pytest.raises(RuntimeError, match="killed"):
        save(tmp_path, step, engine, keep_last=1)
    monkeypatch.undo()
    assert checkpoint_steps(tmp_path) == [step]
    assert newest_checkpoint(tmp_path) == step
    remove_leftovers(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{step:06d}"]


def test_checkpoints_beyond_the_newest_are_leftovers_too(engine, tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, engine, keep_last=3)
    for name in ("step_000020.partial", "step_000005.deleted"):
        (tmp_path / "checkpoints" / name).mkdir()
    remove_leftovers(tmp_path, keep_last=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000015"]


def test_only_what_a_save_left_is_removed(engine, tmp_path):
    save(tmp_path, 5, engine)
    mine = tmp_path / "checkpoints" / "step_000005.mine"
    mine.mkdir()
    save(tmp_path, 10, engine, keep_last=1)
    assert mine.exists()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state.json", "optimizer.pt", "model/model.safetensors", "model/tokenizer.json"])
def test_every_damaged_file_is_named(name, engine, tmp_path):
    path = save(tmp_path, 5, engine) / name
    original = path.read_bytes()
    for damage, message in ((flip, "is damaged"), (lambda path: path.write_bytes(b""), "has 0 bytes")):
        damage(path)
        with pytest.raises(FileError, match=f"{name}: {message}"):
            newest_checkpoint(tmp_path)
        path.write_bytes(original)
    assert newest_checkpoint(tmp_path) == 5
    path.unlink()
    assert checkpoint_steps(tmp_path) == []
    with pytest.raises(FileError, match=f"{name}: no such file"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"optimizer.pt": 3}', '{"../x": {"bytes": 1, "crc32": "0"}}'])
def test_a_damaged_list_of_files_is_named(text, engine, tmp_path):
    (save(tmp_path, 5, engine) / "files.json").write_text(text)
    assert checkpoint_steps(tmp_path) == []
    with pytest.raises(FileError, match=r"files\.json"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ['{"step": 5}', '{"step": 5, "weight_version": "x", "elapsed_s": 1}', "[]", ""])
def test_counters_that_cannot_be_used_are_named(text, engine, tmp_path):
    (save(tmp_path, 5, engine) / "state.json").write_text(text)
    with pytest.raises(FileError, match=r"state\.json: expected"):
        read_state(tmp_path, 5)
