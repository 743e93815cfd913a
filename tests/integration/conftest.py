"""What several tests of commands use."""

import sys

import pytest

from qarl_nemo.cli import main


@pytest.fixture
def qarl(monkeypatch, capfd):
    """Call the command line; returns the exit code and what it printed."""

    def call(*arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qarl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        return ended.value.code, printed.out + printed.err

    return call
