import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.torch import save_file

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_checkpoint, plan_quantization, quantize_checkpoint
from qarl_nemo.checkpoints.merge import Training, merged_checkpoint
from support.disk import FlushedDisk
from support.files import contents
from support.programs import environment
from support.whole_models import DENSE, tensors_of

FORMAT = get_format("w4a16")
SHARD_BYTES = 150_000
KILLED = """
import os, signal, sys
from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint

def kill_in_shard_three(progress):
    if progress.shard == 3:
        os.kill(os.getpid(), signal.SIGKILL)

quantize_checkpoint(sys.argv[1], sys.argv[2], get_format("w4a16"), ["experts"], max_shard_bytes=int(sys.argv[3]),
                    progress=kill_in_shard_three)
"""


class StopError(Exception):
    pass


def stop_in(shard):
    def stop(progress):
        if progress.shard == shard:
            raise StopError

    return stop


def run(source, destination, **options):
    options = {"fmt": FORMAT, "targets": ["experts"], "max_shard_bytes": SHARD_BYTES} | options
    return quantize_checkpoint(source, destination, **options)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(source, tmp_path, monkeypatch):
    disk = FlushedDisk(monkeypatch)
    for overwrite in (False, True):
        run(source, tmp_path / "out", overwrite=overwrite)
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
        assert disk.lost.pop(tmp_path / "out") == set()


def stamps(folder):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def uninterrupted(source, tmp_path_factory):
    destination = tmp_path_factory.mktemp("whole") / "out"
    assert run(source, destination).num_resumed_shards == 0
    return contents(destination)


def test_a_stopped_conversion_goes_on_and_gives_the_same_bytes(source, tmp_path, uninterrupted):
    out, partial = tmp_path / "out", tmp_path / "out.partial" / "checkpoint"
    with pytest.raises(StopError):
        run(source, out, progress=stop_in(3))
    assert not out.exists()
    finished = stamps(partial)
    assert len(finished) == 2
    events = []
    report = run(source, out, progress=events.append)
    assert report.num_resumed_shards == 2
    assert {name: stamps(out)[name] for name in finished} == finished
    assert contents(out) == uninterrupted
    assert not partial.exists()
    assert events[0].shard == 3
    assert events[-1].done_bytes == events[-1].total_bytes == report.plan.source_bytes


def test_a_killed_process_goes_on_and_gives_the_same_bytes(source, tmp_path, uninterrupted):
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out), str(SHARD_BYTES)]
    killed = subprocess.run(command, env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    finished = stamps(tmp_path / "out.partial" / "checkpoint")
    assert len(finished) == 2
    assert run(source, out).num_resumed_shards == 2
    assert {name: stamps(out)[name] for name in finished} == finished
    assert contents(out) == uninterrupted


def test_a_shard_that_was_not_recorded_or_was_cut_is_written_again(source, tmp_path, uninterrupted):
    out, partial = tmp_path / "out", tmp_path / "out.partial" / "checkpoint"
    with pytest.raises(StopError):
        run(source, out, progress=stop_in(4))
    names = sorted(name for name in uninterrupted if name.endswith(".safetensors"))
    (partial / names[0]).write_bytes((partial / names[0]).read_bytes()[:-1])
    (partial / names[3]).write_bytes(b"renamed, but killed before it was recorded")
    (partial / (names[4] + ".tmp")).write_bytes(b"half a shard")
    assert run(source, out).num_resumed_shards == 2
    assert contents(out) == uninterrupted


def test_other_settings_are_refused_and_named(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StopError):
        run(source, out, progress=stop_in(2))
    before = contents(tmp_path / "out.partial" / "checkpoint")
    with pytest.raises(ValueError, match="other settings") as error:
        run(source, out, fmt=get_format("w4a16", group_size=64), targets=["experts", "attention"])
    assert "group_size was 128, now 64" in str(error.value)
    assert "targets was ['experts'], now ['experts', 'attention']" in str(error.value)
    with pytest.raises(ValueError, match=r"\(max_shard_bytes was 150000, now 150001\)"):
        run(source, out, max_shard_bytes=SHARD_BYTES + 1)
    assert contents(tmp_path / "out.partial" / "checkpoint") == before
    report = run(source, out, fmt=get_format("fp8_block"), overwrite=True)
    assert report.num_resumed_shards == 0


def test_another_checkpoint_of_the_same_model_is_refused(source, tmp_path):
    first, second = tmp_path / "step_10", tmp_path / "step_20"
    for copy in (first, second):
        shutil.copytree(source, copy)
        for path in copy.iterdir():
            os.utime(path, (1, 1))
    with pytest.raises(StopError):
        run(first, tmp_path / "out", progress=stop_in(3))
    with pytest.raises(ValueError, match=r"other settings \(source was .*step_10, now .*step_20\)"):
        run(second, tmp_path / "out")


def test_shards_are_written_again_when_any_file_that_they_were_read_from_has_changed(source, tmp_path):
    """An adapter that is merged into a base is such a file."""
    second = tmp_path / "adapter.safetensors"
    second.write_bytes(b"first")
    training = Training(get_format("bf16"), (), {}, 1.0, {}, (second,))
    merged = merged_checkpoint(open_checkpoint(source), training)
    with pytest.raises(StopError):
        run(merged, tmp_path / "out", progress=stop_in(3))
    second.write_bytes(b"longer")
    assert run(merged, tmp_path / "out").num_resumed_shards == 0


def test_an_overwrite_that_was_interrupted_as_the_old_folder_went_needs_no_room(source, tmp_path, monkeypatch):
    run(source, tmp_path / "out")
    remove = shutil.rmtree

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("qarl_nemo.checkpoints.partial.shutil.rmtree", interrupted)
    fmt = get_format("fp8_block")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", fmt=fmt, overwrite=True)
    assert (tmp_path / "out.partial" / "replaced").is_dir()
    monkeypatch.setattr("qarl_nemo.checkpoints.partial.shutil.rmtree", remove)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    run(source, tmp_path / "out", fmt=fmt, overwrite=True)
    assert not (tmp_path / "out.partial" / "replaced").exists()
    with pytest.raises(ValueError, match="what is still to be written"):
        run(source, tmp_path / "other")


def test_a_disk_needs_room_for_what_is_still_to_be_written_only(source, tmp_path, monkeypatch):
    with pytest.raises(StopError):
        run(source, tmp_path / "out", progress=stop_in(4))
    plan = plan_quantization(open_checkpoint(source), FORMAT, ["experts"], SHARD_BYTES)
    finished = list((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors"))
    left = plan.num_bytes - sum(path.stat().st_size for path in finished)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=left - 1))
    with pytest.raises(ValueError, match="what is still to be written"):
        run(source, tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=left))
    assert run(source, tmp_path / "out").num_resumed_shards == len(finished) == 3


def test_another_config_json_is_another_source(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    with pytest.raises(StopError):
        run(copy, tmp_path / "out", progress=stop_in(3))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"other settings \(source_table_sha256 was"):
        run(copy, tmp_path / "out")


@pytest.mark.parametrize("content", ["thesis.tex", "checkpoint/model-00001-of-00007.safetensors"])
def test_a_foreign_partial_folder_is_left_alone(content, source, tmp_path):
    path = tmp_path / "out.partial" / content
    path.parent.mkdir(parents=True)
    path.write_text("x")
    with pytest.raises(ValueError, match="no unfinished conversion of this version of the tool"):
        run(source, tmp_path / "out", overwrite=True)
    assert [p.read_text() for p in tmp_path.rglob("*") if p.is_file()] == ["x"]


def test_an_existing_destination_is_refused(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(
            ValueError, match=r"destination .*out exists and was not written by this tool .*choose anothe"
        ):
            run(source, out, overwrite=overwrite)
    assert contents(out) == {"thesis.tex": b"x"}
    assert not (tmp_path / "out.partial" / "checkpoint").exists()


def test_overwrite_replaces_an_own_destination(source, tmp_path, uninterrupted):
    out = tmp_path / "out"
    run(source, out, fmt=get_format("fp8_block"))
    run(source, out, overwrite=True)
    assert contents(out) == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_removes_nothing_that_others_made(source, tmp_path, uninterrupted):
    out = tmp_path / "out"
    for name in ("out.old", "out.replaced", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("x")
    run(source, out, fmt=get_format("fp8_block"), overwrite=True)
    run(source, out, overwrite=True)
    assert contents(out) == uninterrupted
    assert len(list(tmp_path.glob("*/thesis.tex"))) == 3
    (out / "notes.txt").write_text("the user's")
    (out / "tokenizer_backup").mkdir()
    with pytest.raises(ValueError, match=r"did not write, so it is not overwritten; move away notes\.txt, tokenizer_"):
        run(source, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "the user's"


def test_a_shard_with_a_flipped_bit_is_written_again(source, tmp_path, uninterrupted):
    with pytest.raises(StopError):
        run(source, tmp_path / "out", progress=stop_in(4))
    shard = sorted((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors"))[1]
    flipped = bytearray(shard.read_bytes())
    flipped[-5] ^= 4
    shard.write_bytes(flipped)
    assert run(source, tmp_path / "out").num_resumed_shards == 2
    assert contents(tmp_path / "out") == uninterrupted


@pytest.mark.parametrize("when", ["before", "during"])
def test_files_that_the_conversion_did_not_make_are_not_published(when, source, tmp_path, uninterrupted):
    out, partial = tmp_path / "out", tmp_path / "out.partial" / "checkpoint"

    def add(progress):
        if when == "during":
            (partial / "notes.txt").write_text("the user's")

    with pytest.raises(StopError):
        run(source, out, progress=stop_in(3))
    if when == "before":
        (partial / "notes.txt").write_text("the user's")
    with pytest.raises(ValueError, match=r"which will not be published: notes\.txt; move them away"):
        run(source, out, progress=add)
    assert not out.exists()
    (partial / "notes.txt").unlink()
    run(source, out)
    assert contents(out) == uninterrupted


def test_a_second_process_is_refused_while_the_first_works(source, tmp_path, uninterrupted):
    out, refusals = tmp_path / "out", []

    def compete(progress):
        if not refusals:
            with pytest.raises(ValueError, match=f"out is in use by process {os.getpid()} on .*; wait for it") as error:
                run(source, out, overwrite=True)
            refusals.append(error)

    run(source, out, progress=compete)
    assert refusals
    assert contents(out) == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "an object, but it holds"),
        ("{", "is not JSON"),
        ('{"settings": {}, "shards": {}}', "of another version of this tool (files: field required); delete"),
        ('{"settings": 3, "files": []}', "settings: input should be a valid dict"),
        ('{"settings": {}, "files": ["../../x"]}', "names files outside its folder: ../../x; delete"),
    ],
)
def test_a_damaged_record_is_named_with_the_way_out(content, message, source, tmp_path):
    with pytest.raises(StopError):
        run(source, tmp_path / "out", progress=stop_in(2))
    record = tmp_path / "out.partial" / "qarl_resume.json"
    record.write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(record))) as error:
        run(source, tmp_path / "out")
    assert message in str(error.value)


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(source, tmp_path):
    for device, message in (("cuda:99", "but torch sees"), ("cudo", "device=cudo is not known; legal are cpu, cuda")):
        with pytest.raises(ValueError, match=message):
            run(source, tmp_path / "out", device=device)
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_cannot_be_made_is_one_line(source, tmp_path):
    (tmp_path / "file").write_text("x")
    for destination, message in (
        (tmp_path / "file" / "out", "file.*: not a directory; nothing passes as finished"),
        (tmp_path / ("x" * 255), "file name too long"),
        (tmp_path / "file" / "..", "is no name for a new folder"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            run(source, destination)
        assert "\n" not in str(error.value)


def test_a_nan_is_located_and_repairing_its_file_redoes_only_its_shards(make_source, tmp_path):
    config = DENSE | {"num_hidden_layers": 3}
    tensors = tensors_of(config)
    folder = make_source(tensors, config)
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{layer}.safetensors" for layer in range(3)]
    weight_map = {name: next((f for i, f in enumerate(files) if f".layers.{i}." in name), files[0]) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def write(number, **changes):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == files[number]}
        save_file(held | changes, folder / files[number])

    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    broken = tensors[names[2]].clone()
    broken[5, 7] = float("nan")
    write(0)
    write(1)
    write(2, **{names[2]: broken})
    options = {"targets": ["attention"], "max_shard_bytes": 10_000}
    with pytest.raises(ValueError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight.*first at index \[5, 7\]"):
        run(folder, tmp_path / "out", **options)
    plan = plan_quantization(open_checkpoint(folder), FORMAT, **options)
    assert len(stamps(tmp_path / "out.partial" / "checkpoint")) == len(plan.shards) - 1
    write(2)
    write(1, **{names[1]: tensors[names[1]] * 2})
    untouched = [shard for shard in plan.shards if {file for t in shard.tensors for file in t.info.files} == {files[0]}]
    assert run(folder, tmp_path / "out", **options).num_resumed_shards == len(untouched) > 1
