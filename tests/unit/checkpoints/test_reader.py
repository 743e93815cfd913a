import json
import shutil

import pytest
import torch

from qarl_nemo.checkpoints.reader import open_checkpoint


def test_lists_every_tensor_of_an_indexed_checkpoint(source, read_all):
    checkpoint = open_checkpoint(source)
    expected = read_all(source)
    assert {info.name: info.shape for info in checkpoint.tensors} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert sum(info.num_bytes for info in checkpoint.tensors) == sum(tensor.nbytes for tensor in expected.values())
    with checkpoint.open_reader() as reader:
        for info in checkpoint.tensors:
            assert torch.equal(reader.read(info), expected[info.name])


def test_reads_a_single_file(make_source):
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    checkpoint = open_checkpoint(make_source({"model.norm.weight": weight}))
    (info,) = checkpoint.tensors
    assert (info.shape, info.dtype, info.files, info.num_bytes) == ((2, 3), "F32", ("model.safetensors",), 24)


def test_everything_missing_is_in_one_error(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "broken")
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    gone = [name for name, file in index["weight_map"].items() if file == files[0]]
    (broken / files[0]).unlink()
    (broken / files[1]).write_bytes(b"not safetensors")
    index["weight_map"]["model.layers.9.mlp.gate.weight"] = files[2]
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    (broken / "config.json").unlink()
    with pytest.raises(ValueError, match="is incomplete") as error:
        open_checkpoint(broken)
    for text in [*gone, *files[:2], "model.layers.9.mlp.gate.weight", "missing file config.json"]:
        assert text in str(error.value)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, which are pickles and are never loaded"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_point_outside(make_source):
    folder = make_source({"a": torch.zeros(1)})
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(ValueError, match=r"points outside the checkpoint folder: \.\./other\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(make_source, text):
    folder = make_source({"a": torch.zeros(1)})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"not a readable model\.safetensors\.index\.json"):
        open_checkpoint(folder)
