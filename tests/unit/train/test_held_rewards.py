"""A run notes the code of its reward functions, and says when it goes on with another."""

import importlib
import json
import sys

import pytest

from qarl_nemo.data.config import DatasetConfig, DatasetsData
from qarl_nemo.files import FileError
from qarl_nemo.train.held_rewards import hold_rewards
from qarl_nemo.train.tasks import TaskSource

GOOD = "def good(response, answer): return 1.0\n"
# As long as GOOD: no length tells them apart.
OTHER = "def good(response, answer): return 0.5\n"


@pytest.fixture
def hold(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "problems.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n')

    def hold(code, step, function="held_code:good", module="held_code"):
        if code is not None:
            (tmp_path / f"{module}.py").write_text(code)
        # Each start of a run is another process.
        for name in ("held_code", "held_inner"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        train = DatasetConfig(data_path=str(tmp_path / "problems.jsonl"), reward_function=function)
        hold_rewards(tmp_path, TaskSource(DatasetsData(source="datasets", train=train), 0), step)
        file = tmp_path / "rewards.json"
        return json.loads(file.read_text()) if file.exists() else None

    return hold


def test_a_changed_reward_function_is_told_once_and_noted_with_its_step(hold, capsys):
    first = hold(GOOD, None)["held_code:good"]
    assert hold(GOOD, 2) == {"held_code:good": first}
    assert capsys.readouterr().err == ""
    second = hold(OTHER, 2)["held_code:good"]
    assert list(second) == ["0", "2"]
    assert second["0"] == first["0"] != second["2"]
    told = capsys.readouterr().err
    assert "reward function held_code:good changed since step 2 of this run" in told
    assert told.count("\n") == 1
    assert hold(OTHER, 4)["held_code:good"] == second
    assert capsys.readouterr().err == ""


def test_a_change_back_at_the_same_step_is_told(hold, capsys):
    first = hold(GOOD, None)["held_code:good"]
    hold(OTHER, 2)
    hold(GOOD.replace("1.0", "0.1"), 4)
    capsys.readouterr()
    assert list(hold(GOOD, 2)["held_code:good"].items())[-1] == ("2", first["0"])
    assert "since step 2" in capsys.readouterr().err


def test_the_module_that_a_function_comes_from_counts(hold, tmp_path, capsys):
    (tmp_path / "held_code.py").write_text("from held_inner import good\n")
    hold(GOOD, None, module="held_inner")
    hold(OTHER, 2, module="held_inner")
    assert "held_code:good changed" in capsys.readouterr().err


def test_a_new_run_and_one_of_an_earlier_version_say_nothing(hold, tmp_path, capsys):
    hold(GOOD, None)
    hold(OTHER, None)
    (tmp_path / "rewards.json").unlink()
    assert list(hold(GOOD, 6)["held_code:good"]) == ["6"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("function", [None, "operator:eq"])
def test_without_a_function_or_its_source_nothing_is_noted(hold, function, monkeypatch):
    if function:
        monkeypatch.setattr("inspect.getsource", _has_none)
    assert hold(None, None, function) is None
    assert hold(None, 2, function) is None


def _has_none(module):
    raise OSError("source code not available")


def test_a_damaged_note_is_named(hold, tmp_path):
    hold(GOOD, None)
    (tmp_path / "rewards.json").write_text('{"held_code:good": 1}')
    with pytest.raises(FileError, match=r"rewards\.json: .*held_code:good has none; remove the file"):
        hold(GOOD, 2)
