"""What in a cluster's config no shell could run as it is meant: found when it is read, before anything starts."""

import shlex
import shutil
import subprocess

from qarl_nemo.secrets import assigned_secrets


def program_problem(text: str) -> str | None:
    """Say why words are no program with its arguments; nodes take them as they are, so that nothing in them expands.

    Args:
        text: e.g. `/shared/venv/bin/python -u`.

    Returns:
        The problem and its fix, without the text, which may hold a secret; None if there is none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        return f"it is no program with its arguments: {error}"
    if not words:
        return "it is empty; set python, or a program and its arguments"
    found = ["$"] * ("$" in text) + ["~"] * any(word.startswith("~") for word in words)
    if found:
        return (
            f"it holds {' and '.join(found)}, which no shell expands here; write the whole path, or python, and put "
            "its folder on PATH in setup (source /path/to/venv/bin/activate)"
        )
    return None


def line_problem(line: str) -> str | None:
    """Say why bash cannot read a shell line, in bash's words; None if it can, or if there is no bash here.

    Args:
        line: one line or several.
    """
    bash = shutil.which("bash")
    if bash is None:
        return None
    # -n reads and runs nothing, so neither `shopt -s extglob`, after which more can be read. Without this shell's
    # environment, whose BASH_ENV would be run.
    arguments = [bash, "-O", "extglob", "-n", "-c", line]
    try:
        done = subprocess.run(
            arguments, env={"LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", check=False
        )
    except OSError:  # longer than an argument may be
        return None
    if not done.returncode:
        return None
    # Its other lines repeat the text.
    said = next((each for each in done.stderr.splitlines() if "error" in each or "unexpected" in each), "")
    said = said.partition("-c: ")[2] or said
    if not said or assigned_secrets(line):
        said = "a syntax error"
    return f"bash cannot read it: {said}; close every quote, bracket and block"


def setup_problem(setup: str) -> str | None:
    """Say why nodes cannot run `setup`, which they run as one block.

    Args:
        setup: the config's, with or without a command.
    """
    if not setup.strip():
        return None
    if problem := line_problem(setup):
        return problem
    if line_problem(f"{{ {setup.strip()}\n}}"):
        return "it holds no whole command, or a here-document without its end; complete it, or leave setup out"
    return None
