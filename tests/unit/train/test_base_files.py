"""Where a run's frozen base is found: from any folder, after a move, and never in a model's place that is another."""

import json
from pathlib import Path

import pytest

from qarl_nemo.files import FileError
from qarl_nemo.train.base_files import find_base, hold_base, require_same_base


def model(folder, content=b"weights"):
    """A folder with what is noted of a base: a weight file."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that was started in `home` on the base `models/base`."""
    model(tmp_path / "home/models/base")
    monkeypatch.chdir(tmp_path / "home")
    folder = tmp_path / "run"
    folder.mkdir()
    hold_base(folder, Path("models/base"), new=True)
    hold_base(folder, Path("models/base"), new=False)
    return folder


def test_a_relative_path_leads_to_the_base_from_any_folder(run, tmp_path, monkeypatch):
    assert find_base(run, Path("models/base")) == Path("models/base")
    monkeypatch.chdir(tmp_path)
    assert find_base(run, Path("models/base")) == tmp_path / "home/models/base"
    # Another model of this name.
    model(tmp_path / "models/base", b"others")
    assert find_base(run, Path("models/base")) == tmp_path / "home/models/base"


def test_run_and_base_may_move_together(run, tmp_path, monkeypatch):
    (tmp_path / "home").rename(tmp_path / "other")
    monkeypatch.chdir(tmp_path / "other")
    assert find_base(run, Path("models/base")) == Path("models/base")


def test_a_base_that_changed_is_refused_wherever_it_is(run, tmp_path, monkeypatch):
    (tmp_path / "home/models/base/model.safetensors").write_bytes(b"changed")
    monkeypatch.chdir(tmp_path)
    for given in (None, tmp_path / "home/models/base"):
        with pytest.raises(FileError, match=r"(has changed since|other weight files): model\.safetensors"):
            find_base(run, Path("models/base"), given)


def test_a_base_that_was_moved_is_asked_for(run, tmp_path, monkeypatch):
    moved = (tmp_path / "home/models/base").rename(tmp_path / "moved")
    places = f"frozen base models/base, and there is no such folder, and no {tmp_path}/home/models/base, where it was"
    with pytest.raises(FileError, match=f"{places} at the start: .* say where it is now with --base; a relative path"):
        find_base(run, Path("models/base"))
    assert find_base(run, Path("models/base"), moved) == moved
    with pytest.raises(
        FileError, match=r"--base /nowhere is no folder: name the one that holds .*, which was models/b"
    ):
        find_base(run, Path("models/base"), Path("/nowhere"))


def test_a_run_of_an_earlier_version_has_noted_no_place(run, tmp_path, monkeypatch):
    noted = json.loads((run / "base.json").read_text())
    assert noted.pop("folder") == str(tmp_path / "home/models/base")
    (run / "base.json").write_text(json.dumps(noted))
    require_same_base(run, Path("models/base"))
    assert find_base(run, Path("models/base")) == Path("models/base")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileError, match=r"frozen base models/base, and there is no such folder: put it back there, or say"
    ):
        find_base(run, Path("models/base"))
    assert find_base(run, Path("models/base"), tmp_path / "home/models/base")
