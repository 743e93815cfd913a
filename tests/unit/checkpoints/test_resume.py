import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint

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


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def uninterrupted(source, tmp_path_factory):
    destination = tmp_path_factory.mktemp("whole") / "out"
    assert run(source, destination).num_resumed_shards == 0
    return contents(destination)


def test_a_stopped_conversion_goes_on_and_gives_the_same_bytes(source, tmp_path, uninterrupted):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
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
    assert events[-1].done_bytes == events[-1].total_bytes == report.source_bytes


def test_a_killed_process_goes_on_and_gives_the_same_bytes(source, tmp_path, uninterrupted):
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out), str(SHARD_BYTES)]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    finished = stamps(tmp_path / "out.partial")
    assert len(finished) == 2
    assert run(source, out).num_resumed_shards == 2
    assert {name: stamps(out)[name] for name in finished} == finished
    assert contents(out) == uninterrupted


def test_a_shard_that_was_not_recorded_or_was_cut_is_written_again(source, tmp_path, uninterrupted):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
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
    before = contents(tmp_path / "out.partial")
    with pytest.raises(ValueError, match="other settings") as error:
        run(source, out, fmt=get_format("w4a16", group_size=64), targets=["experts", "attention"])
    assert "group_size was 128, now 64" in str(error.value)
    assert "targets was ['experts'], now ['experts', 'attention']" in str(error.value)
    with pytest.raises(ValueError, match=r"\(max_shard_bytes was 150000, now 150001\)"):
        run(source, out, max_shard_bytes=SHARD_BYTES + 1)
    assert contents(tmp_path / "out.partial") == before
    report = run(source, out, fmt=get_format("fp8_block"), overwrite=True)
    assert report.num_resumed_shards == 0


def test_a_foreign_partial_folder_is_left_alone(source, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="no unfinished conversion of this tool"):
        run(source, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out.partial") == {"thesis.tex": b"x"}


def test_an_existing_destination_is_refused(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"destination .*out exists"):
        run(source, out)
    with pytest.raises(ValueError, match="was not written by this tool"):
        run(source, out, overwrite=True)
    assert contents(out) == {"thesis.tex": b"x"}
    assert not (tmp_path / "out.partial").exists()


def test_overwrite_replaces_an_own_destination(source, tmp_path, uninterrupted):
    out = tmp_path / "out"
    run(source, out, fmt=get_format("fp8_block"))
    run(source, out, overwrite=True)
    assert contents(out) == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_nan_is_located_and_repairing_its_file_redoes_only_its_shards(make_source, tmp_path):
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    folder = make_source({name: torch.randn(128, 128, dtype=torch.bfloat16) for name in names})
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{layer}.safetensors" for layer in range(3)]
    for name, file in zip(names, files, strict=True):
        save_file({name: tensors[name]}, folder / file)
    weight_map = ", ".join(f'"{name}": "{file}"' for name, file in zip(names, files, strict=True))
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}')
    broken = tensors[names[2]].clone()
    broken[5, 7] = float("nan")
    save_file({names[2]: broken}, folder / files[2])
    with pytest.raises(ValueError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight.*first at index \[5, 7\]"):
        run(folder, tmp_path / "out", targets=["attention"], max_shard_bytes=10_000)
    assert len(stamps(tmp_path / "out.partial")) == 2
    save_file({names[2]: tensors[names[2]]}, folder / files[2])
    save_file({names[1]: tensors[names[1]] * 2}, folder / files[1])
    assert run(folder, tmp_path / "out", targets=["attention"], max_shard_bytes=10_000).num_resumed_shards == 1
