"""`tools/make/arithmetic_model.py` makes what it was asked for, or says that it did not."""

import sys
from importlib import import_module

import pytest


@pytest.fixture
def make(tools, tmp_path, monkeypatch):
    tools("make")
    main = import_module("arithmetic_model").main

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["arithmetic_model.py", str(tmp_path / "made"), "--device", "cpu", *options])
        main()

    return call


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--warm-start", "2"], "--warm-start 2.0: set a share from 0 to 1"),
        (["--largest", "-1"], "--largest -1: set 1 or more"),
        (["--device", "abacus"], "--device abacus: "),
    ],
)
def test_what_it_cannot_make_is_refused_before_there_is_a_folder(options, says, make, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        make(*options)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_warm_start_that_was_not_reached_is_no_success(make, tmp_path):
    with pytest.raises(SystemExit, match=r"after --max-steps 1 fewer than --warm-start 90% of the held-out answers"):
        make("--warm-start", "0.9", "--max-steps", "1", "--batch", "1", "--size", "dense")
    assert not (tmp_path / "made" / "model" / "model.safetensors").exists()
