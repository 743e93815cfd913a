"""What a user writes for a shell, for `sbatch` or for a launcher that never reads it is refused when it is read."""

import pytest

from qarl_nemo.cluster.cli import main
from support.clusters import ROOT, one_machine

VALUE = "do-not-print-me"


def _refused(name, override, says, capsys):
    assert main(["launch", str(ROOT / f"docker/clusters/{name}.yaml"), "--dry-run", override]) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert VALUE not in printed


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("python='$VENV/bin/python'", "python: it holds $, which no shell expands here; write the whole path"),
        ("python='~/venv/bin/python'", "python: it holds ~, which no shell expands here"),
        ("python='env A=1 ~/venv/bin/python -X $Y'", "python: it holds $ and ~,"),
        ("""command='python -c "print(1)'""", "command: bash cannot read it: line 1: unexpected EOF while looking for"),
        ("setup='if true; then a'", "setup: bash cannot read it: line 2: syntax error: unexpected end of file"),
        ("setup='(a))'", "setup: bash cannot read it: line 1: syntax error near unexpected token `)'"),
        (f"setup='HF_TOKEN={VALUE} )'", "setup: bash cannot read it: a syntax error; close every quote"),
        (f"setup='x {VALUE} )'", "setup: bash cannot read it: line 1: syntax error near unexpected token `)'"),
        ("setup='# module load cuda'", "setup: it holds no whole command"),
    ],
)
def test_what_no_shell_could_run_is_refused_without_showing_it(override, says, capsys):
    _refused("hosts", override, says, capsys)


@pytest.mark.parametrize("python", ["/a~b/python -u", "nice -n 5 python", "env A=1 '/my venv/bin/python'"])
def test_programs_with_arguments_are_taken(tmp_path, python):
    assert one_machine(tmp_path, python=python).python == python


def test_shell_lines_of_several_commands_are_taken_and_none_is_run(tmp_path):
    line = "module() { :; }\nmodule load cuda # it's mine\nshopt -s extglob\nls !(a)\n"
    line += f"cat <<'E' >{tmp_path}/made\nit's\nE\n"
    config = one_machine(tmp_path, setup=line, command=line)
    assert (config.setup, config.command) == (line, line)
    assert not (tmp_path / "made").exists()


def test_lines_are_not_read_where_there_is_no_bash(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    one_machine(tmp_path, setup="'")
