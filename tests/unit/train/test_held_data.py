"""A run goes on with the problems that it began with."""

import json
from types import SimpleNamespace

import pytest

from qarl_nemo.config import ConfigError
from qarl_nemo.data.config import DatasetConfig, DatasetsData
from qarl_nemo.train.held_data import hold_data
from qarl_nemo.train.tasks import TaskSource

ENCODE = SimpleNamespace(template=None, text=str)
REWARDS = """
def of_fields(response, answer, record): return record["worth"]
def of_verl(solution_str, ground_truth, extra_info): return extra_info
def of_answers(response, answer): return 1.0
"""


@pytest.fixture
def hold(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_fields.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)

    def hold(function, *, new=False, **fields):
        record = {"problem": "1+1=", "answer": "2", "worth": 1.0, "extra_info": 1.0} | fields
        (tmp_path / "problems.jsonl").write_text(json.dumps(record) + "\n")
        train = DatasetConfig(data_path=str(tmp_path / "problems.jsonl"), reward_function=function)
        hold_data(tmp_path, TaskSource(DatasetsData(source="datasets", train=train), 0), ENCODE, new=new)

    return hold


@pytest.mark.parametrize(("function", "field"), [("of_fields", "worth"), ("of_verl", "extra_info")])
def test_fields_that_a_reward_function_reads_are_held(hold, function, field):
    hold(f"rewards_of_fields:{function}", new=True)
    hold(f"rewards_of_fields:{function}")
    with pytest.raises(ConfigError, match=r"data\.train .*, or other fields for its reward function; bring those back"):
        hold(f"rewards_of_fields:{function}", **{field: 2.0})


@pytest.mark.parametrize("function", ["rewards_of_fields:of_answers", None])
def test_fields_that_nothing_reads_may_change(hold, function):
    hold(function, new=True)
    hold(function, worth=2.0)


def test_a_run_of_an_earlier_version_which_held_no_fields_goes_on(hold, tmp_path):
    hold(None, new=True)
    held = (tmp_path / "data.json").read_text()
    hold("rewards_of_fields:of_fields", new=True)
    assert (tmp_path / "data.json").read_text() != held
    (tmp_path / "data.json").write_text(held)
    hold("rewards_of_fields:of_fields")
