"""Destinations that cannot be made or replaced are refused before any work."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.cli import app
from support.files import contents


def untouched(progress):
    raise AssertionError("a tensor was quantized")


def run(source, destination, **options):
    return quantize_checkpoint(source, destination, get_format("w4a16"), ["experts"], **options)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("target", ["gone", "out"])
def test_a_link_to_nothing_is_refused_before_the_work(source, tmp_path, target, overwrite):
    (tmp_path / "out").symlink_to(target)
    said = rf"out is a symbolic link to {tmp_path / target}, which does not exist; remove it or make its target and"
    with pytest.raises(ValueError, match=said):
        run(source, tmp_path / "out", overwrite=overwrite, progress=untouched)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_to_a_folder_leads_to_that_folder(source, tmp_path, overwrite):
    run(source, tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    said = rf"out is a symbolic link to {tmp_path / 'elsewhere'}, and a link is not replaced; name {tmp_path}/elsewhere"
    with pytest.raises(ValueError, match=said):
        run(source, tmp_path / "out", overwrite=overwrite, progress=untouched)
    assert (tmp_path / "out").is_symlink()
    assert contents(tmp_path / "elsewhere") == before
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "out"}


def deny(monkeypatch, *folders):
    # Tests may run as root, who may write everywhere.
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in folders and allowed(path, mode))


def test_a_folder_that_cannot_be_written_is_refused_with_all_else_before_the_work(source, tmp_path, monkeypatch):
    deny(monkeypatch, tmp_path)
    for out in (tmp_path / "out", tmp_path / "new" / "out"):
        done = CliRunner().invoke(app, ["quantize", str(source), str(out), "--max-shard-bytes", "0"])
        printed = " ".join(done.output.split())
        assert f"{out.parent} cannot be written to: permission denied; choose another place max_shard_bytes" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_cannot_be_replaced_is_refused_before_the_work(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(source, out)
    before = contents(out)
    deny(monkeypatch, out)
    with pytest.raises(ValueError, match=rf"out cannot be replaced: permission denied; .* \(chmod u\+wx {out}\)"):
        run(source, out, overwrite=True, progress=untouched)
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
