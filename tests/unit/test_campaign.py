"""The campaign's own parts: damage is reproducible and does damage, and the oracles notice what is wrong."""

import json
import random
import shutil

import pytest
import torch
from checkpoint_commands import Quantize
from commands import BY_FORMAT
from damage import Worker, prepare
from edits import Edit, draw_edit
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def quantize(tmp_path_factory):
    return prepare(Quantize, tmp_path_factory.mktemp("campaign"))


@pytest.fixture
def accepted(quantize, tmp_path):
    """A case whose output is what the undamaged inputs give."""
    shutil.copytree(quantize.base, tmp_path / "case")
    shutil.copytree(quantize.base.with_name("quantize-expected"), tmp_path / "case" / "out")
    return tmp_path / "case"


def test_a_case_depends_on_seed_and_number_alone_and_damages(quantize, tmp_path):
    with_one = [quantize.draw(random.Random(f"1 {number}")) for number in range(60)]
    assert with_one == [quantize.draw(random.Random(f"1 {number}")) for number in range(60)]
    assert with_one != [quantize.draw(random.Random(f"2 {number}")) for number in range(60)]
    assert len({str(edit) for edits in with_one for edit in edits}) > 50


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "loop", "dangling", "endless"])
def test_a_file_becomes_something_else(kind, tmp_path):
    (tmp_path / "file").write_text("x")
    Edit("file", "", kind=kind).apply(tmp_path)
    path = tmp_path / "file"
    assert path.is_dir() == (kind == "folder")
    assert path.is_symlink() == (kind in ("loop", "dangling", "endless"))
    assert not path.is_file()


def test_every_format_is_damaged_in_ways_of_its_own(quantize):
    for place in ("model/config.json", "model/model-00001-of-00003.safetensors"):
        before = (quantize.base / place).read_bytes()
        edits = [
            draw_edit(random.Random(n), quantize.base, place, BY_FORMAT[place[place.rindex(".") :]]) for n in range(40)
        ]
        contents = [edit.content for edit in edits if edit.content is not None]
        assert sum(content != before for content in contents) > 0.8 * len(contents)


def test_the_oracle_accepts_what_undamaged_inputs_give_and_nothing_else(quantize, accepted):
    assert quantize.wrongly_accepted(accepted, []) is None
    shard = next((accepted / "out").glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)
    save_file(tensors | {name: tensors[name] * 2}, shard, metadata={"format": "pt"})
    assert "is not what" in quantize.wrongly_accepted(accepted, [])


def test_the_oracle_accepts_other_weights_that_the_output_holds_too(quantize, accepted):
    for folder in ("model", "out"):
        for shard in (accepted / folder).glob("*.safetensors"):
            tensors = load_file(shard)
            if "model.norm.weight" in tensors:
                tensors["model.norm.weight"] *= 2
                save_file(tensors, shard, metadata={"format": "pt"})
    assert quantize.wrongly_accepted(accepted, []) is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rms_norm_eps": ""}, "the source is damaged"),
        ({"moe_intermediate_size": 128}, "source is damaged|transformers finds"),
    ],
)
def test_the_oracle_refuses_a_config_that_transformers_refuses(quantize, accepted, values, reason):
    for folder in ("model", "out"):
        config = json.loads((accepted / folder / "config.json").read_text())
        (accepted / folder / "config.json").write_text(json.dumps(config | values))
    found = quantize.wrongly_accepted(accepted, [])
    assert any(part in found for part in reason.split("|"))


def test_a_refusal_that_leaves_a_destination_is_noticed(quantize, accepted):
    assert quantize.left_behind(accepted, None) == "there is a destination"
    shutil.rmtree(accepted / "out")
    assert quantize.left_behind(accepted, None) is None


def test_a_worker_tells_refusals_from_tracebacks_and_wrong_acceptances(quantize, tmp_path, monkeypatch):
    worker = Worker(quantize, 0, tmp_path)
    try:
        assert worker.try_edits([]) is None
        assert worker.try_edits([Edit("model/config.json", "", b"[]")]) is None
        assert worker.try_edits([Edit("model/config.json", "", kind="pipe")]) is None
        answers = iter([(1, "Traceback (most recent call last): ..."), (70, ""), (-11, ""), (-14, ""), (137, "")])
        monkeypatch.setattr(worker, "run", lambda *_: next(answers))
        assert [worker.try_edits([])[0] for _ in range(5)] == ["traceback"] * 3 + ["hang", "traceback"]
    finally:
        worker.close()
