"""Files of `torch_dist` that are damaged, or that mean harm: each is refused with its name and place."""

import os
import pickle
import re
from pathlib import PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_megatron, quantize_checkpoint
from qarl_nemo.checkpoints.restricted_pickle import load_metadata
from qarl_nemo.checkpoints.stored_tensor import Chunk, StoredTensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Touch:
    """What a pickle from outside may do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_table_of_contents_with_foreign_classes_is_refused_unexecuted(megatron, tmp_path):
    source, folder = megatron()
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.planner_data = [Touch(str(tmp_path / "executed")), re.compile("x")]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"names posix\.mkdir, re\._compile; nothing but"):
        open_megatron(source, folder)
    assert not (tmp_path / "executed").exists()
    for content in (b"", b"\x80\x04.", pickle.dumps({"a": 1}), (b"cos\nsystem\n(S'x'\ntR.")):
        (source / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match="metadata"):
            open_megatron(source, folder)


@pytest.mark.parametrize(
    "name", ["pathlib PosixPath", "torch Size", "torch.distributed.checkpoint.metadata Metadata", "torch float32"]
)
@pytest.mark.parametrize("state", [{"name": "evil"}, (None, {"name": "evil"})])
def test_a_table_of_contents_cannot_change_a_class(name, state, tmp_path):
    # The opcodes c (a class by its name) and b (give it a state), around a state that torch's own classes might have.
    content = b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + pickle.dumps(state, 2)[2:-1] + b"b."
    before = PurePosixPath.name, set(dir(torch.Size)), set(dir(Metadata))
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="not a readable torch_dist table of contents"):
        load_metadata(tmp_path / ".metadata")
    assert before == (PurePosixPath.name, set(dir(torch.Size)), set(dir(Metadata)))


def test_any_flipped_bit_of_a_chunk_is_noticed_or_changes_nothing(models, megatron):
    source, folder = megatron()
    places = pickle.loads((source / ".metadata").read_bytes()).storage_data
    key = "decoder.layers.mlp.router.weight"
    where = next(place for index, place in places.items() if index.fqn == key and index.offset[0] == 1)
    intact = (source / where.relative_path).read_bytes()
    checkpoint = open_megatron(source, folder)
    (info,) = (info for info in checkpoint.tensors if info.name == "model.layers.1.mlp.gate.weight")
    expected = models["moe"][1][info.name]

    def read() -> str:
        with checkpoint.open_reader() as reader:
            try:
                return "equal" if torch.equal(reader.read(info), expected) else "other values"
            except ValueError as error:
                return str(error)

    outcomes = []
    for bit in torch.randint(0, 8 * where.length, (100,)).tolist():
        damaged = bytearray(intact)
        damaged[where.offset + bit // 8] ^= 1 << bit % 8
        (source / where.relative_path).write_bytes(damaged)
        outcomes.append(read())
    errors = [outcome for outcome in outcomes if outcome not in ("equal", "other values")]
    assert "other values" not in outcomes
    assert all(f"{where.relative_path}: {key} at [1, 0, 0]" in error for error in errors)
    # The weight is 1024 of some 3500 bytes; padding and time stamps are most of the others.
    assert len(errors) > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor, _: tensor.chunks[0].__dict__.update(offsets=torch.Size([-1, 0, 0])), "found -1; the file is d"),
        (lambda tensor, _: tensor.chunks[0].__dict__.update(sizes=torch.Size([1, 4])), "expected 3 dimensions, found"),
        (lambda tensor, _: tensor.chunks[0].__dict__.update(sizes=(1, 4, 128)), "expected a torch.Size, found tuple"),
        (lambda tensor, _: tensor.__dict__.update(chunks=None), "chunks: expected list, found None"),
        (lambda tensor, _: tensor.__dict__.update(size=torch.Size([2**62, 4, 128])), "from 0 to 2^62, found 46116860"),
        (lambda tensor, _: tensor.__dict__.update(properties=3), "dtype: expected dtype, found None"),
        (lambda tensor, _: tensor.__dict__.update(size=torch.Size([2**40, 2**20, 128])), "has shape [1099511627776,"),
        (lambda tensor, _: tensor.chunks.append(tensor.chunks[0]), "its 3 chunks hold 1536 of 1024 values"),
        (lambda _, place: place.__dict__.update(offset=-5), "at [0, 0, 0]: offset: expected a number from 0 to 2^62"),
        (lambda _, place: place.__dict__.update(offset="5"), "offset: expected a number from 0 to 2^62, found '5'"),
        (lambda _, place: place.__dict__.update(length=10), "too few bytes to the chunks at [0, 0, 0] (10 of 1024 byt"),
        (lambda _, place: place.__dict__.update(relative_path=7), "relative_path: expected str, found 7"),
        (lambda _, place: place.__dict__.update(relative_path="\0"), "missing files \0"),
    ],
)
def test_numbers_that_cannot_be_are_named_with_file_and_key(change, message, megatron):
    source, folder = megatron()
    metadata = pickle.loads((source / ".metadata").read_bytes())
    key = "decoder.layers.mlp.router.weight"
    index = next(index for index in metadata.storage_data if index.fqn == key and index.offset[0] == 0)
    change(metadata.state_dict_metadata[key], metadata.storage_data[index])
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"mlp\.router\.weight|missing files") as error:
        open_megatron(source, folder)
    assert message in str(error.value)
    assert str(source) in str(error.value)


def test_chunks_that_overlap_and_leave_a_hole_are_refused():
    def chunk(*offsets):
        return Chunk(offsets, (2, 2), "file", 0, 100, ())

    def problems(*chunks):
        return StoredTensor("key", (4, 4), torch.float32, chunks).problems()

    assert problems(chunk(0, 0), chunk(0, 2), chunk(2, 0), chunk(2, 2)) == []
    (problem,) = problems(chunk(0, 0), chunk(0, 1), chunk(2, 0), chunk(2, 2))
    assert "its 4 chunks hold 16 of 16 values, some twice; a rank's part is missing" in problem


def test_a_chunk_that_is_no_plain_tensor_is_refused(megatron, tmp_path):
    source, folder = megatron()
    checkpoint = open_megatron(source, folder)
    places = pickle.loads((source / ".metadata").read_bytes()).storage_data
    where = next(place for index, place in places.items() if index.fqn == "decoder.layers.mlp.router.weight")
    path = tmp_path / "evil.pt"
    torch.save(Touch(str(tmp_path / "executed")), path)
    evil = path.read_bytes().ljust(where.length, b"\0")
    with (source / where.relative_path).open("r+b") as file:
        file.seek(where.offset)
        file.write(evil)
    with pytest.raises(ValueError, match=r"mlp\.router\.weight at \[\d, 0, 0\].*is not a tensor that is safe to load"):
        quantize_checkpoint(checkpoint, tmp_path / "out", get_format("bf16"), ["experts"])
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()


def test_files_that_are_missing_or_truncated_are_listed(megatron):
    source, folder = megatron(tp=2)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    (file,) = source.glob("*.distcp")
    kept = file.read_bytes()
    file.write_bytes(kept[:5000])
    with pytest.raises(ValueError, match=r"__0_0\.distcp is truncated: it has 5000 bytes, and \.metadata points at"):
        open_megatron(source, folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"missing files __0_0\.distcp"):
        open_megatron(source, folder)
    file.write_bytes(kept)
    key = "decoder.layers.self_attention.linear_proj.weight"
    gone = metadata.state_dict_metadata[key].chunks.pop()
    moved = next(index for index in metadata.storage_data if index.fqn == "decoder.final_layernorm.weight")
    metadata.storage_data[moved].__dict__["relative_path"] = "../../etc/passwd"
    lost = next(index for index in metadata.storage_data if index.fqn == "decoder.layers.mlp.router.weight")
    del metadata.storage_data[lost]
    packed = next(index for index in metadata.storage_data if index.fqn == "output_layer.weight")
    metadata.storage_data[packed].__dict__["transform_descriptors"] = ["zstd"]
    norms = metadata.state_dict_metadata["decoder.layers.self_attention.q_layernorm.weight"].chunks
    norms[1] = norms[0]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="cannot convert") as error:
        open_megatron(source, folder)
    # 2 layers of [128, 128] in halves, one of which is gone
    assert gone.sizes == torch.Size([1, 128, 64])
    assert f"{key} [2, 128, 128]: its 3 chunks hold 24576 of 32768 values; a rank's part is missing" in str(error.value)
    assert ".metadata points outside the checkpoint folder: ../../etc/passwd" in str(error.value)
    assert "output_layer.weight: chunks are stored through zstd; save without extensions" in str(error.value)
    assert "decoder.layers.self_attention.q_layernorm.weight [2, 32]: its 2 chunks hold" in str(error.value)
    assert "decoder.layers.mlp.router.weight: .metadata has no place for the chunks at [[0, 0, 0]]" in str(error.value)
