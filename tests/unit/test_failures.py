"""How a command ends: exit codes, one message, and no traceback that nobody asked for."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qarl_nemo.cli.program import command
from qarl_nemo.cluster.config import ClusterError
from qarl_nemo.config import ConfigError
from qarl_nemo.failures import run_reported
from qarl_nemo.files import read_text
from qarl_nemo.metrics.summary import smoothing_window


def raising(error):
    def call():
        raise error

    return call


def ours(expression: str):
    """Evaluate in a module of the package, as its own code would."""
    return lambda: eval(expression, {"__name__": "qarl_nemo.train.policy"})


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
        # Raised by this package on purpose: the message alone.
        (lambda: read_text(Path("no.yaml"), "a config"), 2, "qarl: no.yaml: expected a config, but: no such file"),
        (raising(KeyboardInterrupt()), 130, "qarl: interrupted"),
        (raising(ClusterError("no nodes")), 3, "no nodes"),
        (raising(ConfigError("two problems")), 2, "two problems"),
        (lambda: Path("/nowhere/run.yaml").read_text(), 2, "qarl: /nowhere/run.yaml: no such file or directory"),
        (raising(OSError(errno.ENOSPC, "No space left on device", "a.bin")), 2, "qarl: a.bin: the disk is full"),
        (raising(OSError(errno.ENOSPC, "No space left on device")), 2, "the disk is full"),
        # a library's, or a builtin's: type and place are told
        (ours("int('x')"), 2, "qarl: ValueError in qarl_nemo.train.policy, line 1: invalid literal"),
        (raising(MemoryError()), 2, "MemoryError: no further words"),
        (raising(EOFError()), 70, "EOFError"),
        # nothing a user can cause: a fault of ours, with its place
        (ours("{}['step']"), 70, "qarl: KeyError in qarl_nemo.train.policy, line 1: 'step'; this is a fault of qarl"),
        (lambda: smoothing_window(None), 70, "TypeError in qarl_nemo.metrics.summary, line "),
    ],
)
def test_every_end_has_its_code_and_one_line(call, code, message, capsys):
    assert run_reported(call, "qarl") == code
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == (1 if message else 0)
    assert "Traceback" not in printed


def test_debug_shows_the_traceback_and_the_message(capsys, monkeypatch):
    monkeypatch.setenv("QARL_DEBUG", "1")
    assert run_reported(raising(ConfigError("wrong key")), "qarl") == 2
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert printed.endswith("qarl: wrong key\n")


@pytest.mark.parametrize("module", ["qarl_nemo", "qarl_nemo.cli"])
def test_the_command_runs_as_a_module_and_knows_its_version(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    name, version = done.stdout.split()
    assert (name, version) == ("qarl", sys.modules["qarl_nemo"].__version__)


@pytest.mark.parametrize("write", ["print", "Console().print"])
def test_a_reader_that_leaves_ends_the_command_in_silence(write):
    # More than a pipe holds, to one that is closed after a line.
    program = (
        "import sys\nfrom rich.console import Console\nfrom qarl_nemo.failures import run_reported\n"
        f"write = {write}\n"
        "sys.exit(run_reported(lambda: [write('x' * 70) for _ in range(3000)] and 0, 'qarl'))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


def test_another_broken_pipe_is_an_error(capsys):
    reader, writer = os.pipe()
    os.close(reader)
    assert run_reported(lambda: os.write(writer, b"x"), "qarl") == 2
    os.close(writer)
    assert "broken pipe" in capsys.readouterr().err


def test_commands_are_behind_the_boundary(capsys, monkeypatch):
    monkeypatch.setattr("qarl_nemo.cli.program.app.registered_commands", [])

    @command
    def broken() -> None:
        raise KeyError("gone")

    with pytest.raises(SystemExit) as ended:
        broken()
    assert ended.value.code == 70
    assert "fault of qarl" in capsys.readouterr().err


def test_help_joins_the_lines_of_a_paragraph(monkeypatch):
    monkeypatch.setattr("qarl_nemo.cli.program.app.registered_commands", commands := [])

    @command
    def described() -> None:
        """Say one thing.

        Then another, which takes
        two lines.
        """

    assert commands[0].help == "Say one thing.\n\nThen another, which takes two lines."
