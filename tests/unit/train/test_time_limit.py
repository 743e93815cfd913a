"""A run's time: when no other step fits before its last checkpoint has to be there."""

import time

import pytest

from qarl_nemo.config import ConfigError, load_config
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.time_limit import STARTED, TimeLimit, limit_seconds


@pytest.fixture
def now():
    return [100.0]


def test_a_step_and_a_checkpoint_as_long_as_the_longest_have_to_fit(now):
    limit = TimeLimit("00:00:01:00", clock=lambda: now[0])
    for seconds in (20.0, 12.0):
        assert not limit.is_up()
        with limit.timed("step"):
            now[0] += seconds
    assert not limit.is_up()
    with limit.timed("checkpoint"):
        now[0] += 5.0
    # 37 of 60 s have passed, and 25 more do not fit.
    assert limit.is_up()


def test_without_a_limit_there_is_always_time(now):
    limit = TimeLimit(None, clock=lambda: now[0])
    with limit.timed("step"):
        now[0] += 1e9
    assert not limit.is_up()


@pytest.mark.parametrize(("text", "seconds"), [("00:03:45:00", 13500), ("2:00:00:01", 172_801), ("00:00:00:59", 59)])
def test_days_hours_minutes_and_seconds(text, seconds):
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "3:45", "00:03:45", "00:24:00:00", "00:00:60:00", "-1:00:00:00", "00:00:00:00"])
def test_what_is_no_time_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"days:hours:minutes:seconds, for example '00:03:45:00'"):
        limit_seconds(text)


def test_a_run_of_a_comparison_has_what_is_left_of_the_commands_time(now, monkeypatch):
    monkeypatch.setenv(STARTED, str(time.time() - 30))
    limit = TimeLimit("00:00:01:00", clock=lambda: now[0])
    assert not limit.is_up()
    now[0] += 31.0
    assert limit.is_up()


MINIMAL = "run_dir: x\npolicy: {model_init: {}}\nloss_fn: {objective: tbpo}\n"


def test_a_time_that_yaml_reads_as_a_number_is_to_be_quoted(tmp_path):
    def load(limit):
        path = tmp_path / "run.yaml"
        path.write_text(f"{MINIMAL}checkpointing: {{checkpoint_must_save_by: {limit}}}\n")
        return load_config(path, [], LocalConfig).checkpointing.checkpoint_must_save_by

    assert (load("01:03:45:00"), load("'1:03:45:00'"), load("null")) == ("01:03:45:00", "1:03:45:00", None)
    with pytest.raises(
        ConfigError, match=r"line \d+: 1:03:45:00 is no decimal number in YAML; .* '1:03:45:00' in quotes"
    ):
        load("1:03:45:00")
    with pytest.raises(
        ConfigError, match=r"save_by: put days:hours:minutes:seconds in quotes, .* in the place of 13500"
    ):
        load("13500")


def test_a_limit_without_checkpoints_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"{MINIMAL}checkpointing: {{enabled: false}}\n")
    load_config(path, [], LocalConfig)
    with pytest.raises(ConfigError, match=r"enabled=false it could never go on; set enabled=true, or checkpoint_must"):
        load_config(path, ["checkpointing.checkpoint_must_save_by=00:01:00:00"], LocalConfig)
