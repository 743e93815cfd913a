import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import save

from qarl_nemo.architecture import read_architecture
from qarl_nemo.checkpoints.reader import open_checkpoint
from qarl_nemo.files import FileError
from qarl_nemo.names import natural_key


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
    first = min((name for name, file in index["weight_map"].items() if file == files[0]), key=natural_key)
    (broken / files[0]).unlink()
    (broken / files[1]).write_bytes(b"not safetensors")
    index["weight_map"]["model.layers.9.mlp.gate.weight"] = files[2]
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    (broken / "config.json").unlink()
    with pytest.raises(ValueError, match="is incomplete") as error:
        open_checkpoint(broken)
    for text in [
        f"missing file {files[0]}, which holds {first}",
        *files[:2],
        "model.layers.9.mlp.gate.weight",
        "missing file config.json",
    ]:
        assert text in str(error.value)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, which are pickles and are never loaded"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/passwd", "..", "", ".", "a/b", "a\0b", "a\n", 3, None, ["a"]]
)
def test_an_index_cannot_point_outside(make_source, file):
    folder = make_source({"a": torch.zeros(1)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(FileError, match="names what is no file of the checkpoint's folder: 'a': ") as error:
        open_checkpoint(folder)
    assert ascii(file) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"metadata": -Infinity, "weight_map": {"a": "model.safetensors"}}',
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        "{",
        '"' + "[" * 9999,
    ],
)
def test_a_damaged_index_is_named(make_source, text):
    folder = make_source({"a": torch.zeros(1)})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FileError, match=r"model\.safetensors\.index\.json: expected "):
        open_checkpoint(folder)


def header(tensors, data=b"", **entries):
    """A safetensors file whose header is what it is told to be."""
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors | entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


WHOLE = save({"a": torch.zeros(2), "b": torch.ones(2)})
DAMAGED = {
    "empty": b"",
    "eight bytes": WHOLE[:8],
    "huge header": struct.pack("<Q", 2**63) + WHOLE[8:],
    "header behind the end": struct.pack("<Q", 10**6) + WHOLE[8:],
    "truncated header": WHOLE[:20],
    "truncated data": WHOLE[:-3],
    "trailing bytes": WHOLE + b"xyz",
    "not JSON": header(b"{]"),
    "a list": header(b"[]"),
    "not UTF-8": header(b"\xff\xfe"),
    "unknown dtype": header({"a": entry(dtype="F31")}, bytes(8)),
    "dtype a number": header({"a": entry(dtype=4)}, bytes(8)),
    "shape of another size": header({"a": entry(shape=(3,))}, bytes(8)),
    "negative shape": header({"a": entry(shape=(-2,))}, bytes(8)),
    "shape that overflows": header({"a": entry(shape=(2**40, 2**40))}, bytes(8)),
    "offsets reversed": header({"a": entry(offsets=(8, 0))}, bytes(8)),
    "offsets behind the end": header({"a": entry(offsets=(8, 16))}, bytes(8)),
    "overlapping": header({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "a hole": header({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "metadata of numbers": header({"a": entry(), "__metadata__": {"format": 3}}, bytes(8)),
    "lacks offsets": header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named(make_source, kind):
    folder = make_source({"a": torch.zeros(1)})
    (folder / "model.safetensors").write_bytes(DAMAGED[kind])
    with pytest.raises(ValueError, match=r"model\.safetensors is (not a readable safetensors file|a Git LFS pointer)"):
        open_checkpoint(folder)


def test_what_is_no_file_is_named(make_source):
    folder = make_source({"a": torch.zeros(1)})
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(ValueError, match="is incomplete") as error:
        open_checkpoint(folder)
    assert "model.safetensors: expected a safetensors file, but it is not a regular file" in str(error.value)
    assert "config.json: expected a model's config.json, but it is a folder" in str(error.value)


def test_nothing_lies_outside_the_index(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "more")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    removed = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    shutil.copy(folder / removed, folder / "model-00099-of-00099.safetensors")
    shutil.copy(folder / removed, folder / "consolidated.safetensors")  # Mistral's own copy, which no engine reads
    with pytest.raises(ValueError, match="is incomplete") as error:
        open_checkpoint(folder)
    assert f"{removed} holds tensors the index does not put there: model.norm.weight" in str(error.value)
    assert "weight files beside those of the checkpoint: model-00099-of-00099.safetensors;" in str(error.value)
    assert "consolidated" not in str(error.value)


def test_thousands_of_missing_names_are_counted(make_source):
    folder = make_source({"a": torch.zeros(1)})
    names = [f"x{number}.{number}" for number in range(3000)]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors") | {"a": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"x0\.0, .* and 2992 more") as error:
        open_checkpoint(folder)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("inside", "hint"),
    [
        ("adapter_config.json", "a LoRA adapter: merge it"),
        (
            "checkpoints/step_000002/model/adapter_config.json",
            r"the adapters of .* are in .*model: qarl eval",
        ),
        ("trained.safetensors", "on a frozen base, without the base: qarl eval takes the run"),
        ("checkpoints/step_000002/model/trained.safetensors", r"whole model of it \(qarl export .* \.\.\.\)$"),
        ("model/config.json", "are in .*model: name that"),
        ("checkpoints/step_000002/model/config.json", r"holds 1 models: name one of .*/checkpoints/step_000002/model$"),
    ],
)
def test_other_folders_get_the_hint_that_fits(tmp_path, inside, hint):
    (tmp_path / inside).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / inside).write_text("{}")
    with pytest.raises(FileError, match=hint):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("read", [open_checkpoint, read_architecture])
def test_a_quantization_config_that_is_no_object_is_named(source, tmp_path, read):
    folder = shutil.copytree(source, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": ["int8"]}))
    with pytest.raises(ValueError, match=r"config\.json: .*quantization_config.* object, or none"):
        read(folder)


def test_a_hub_name_is_told_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=r"Qwen/Qwen3-8B does not exist; .*hf download Qwen/Qwen3-8B"):
        open_checkpoint("Qwen/Qwen3-8B")
    with pytest.raises(FileError, match=r"gone does not exist$"):
        open_checkpoint(tmp_path / "gone")
