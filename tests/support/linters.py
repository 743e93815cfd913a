"""Linters of shell scripts, Dockerfiles and Kubernetes objects; `pip install -e '.[dev]'` brings the first two."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def program(name: str) -> str:
    """Find a linter beside this Python or on PATH; skip the test without it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def assert_clean(name: str, *arguments: str, text: str | None = None) -> None:
    """Fail with everything the linter found."""
    done = subprocess.run([program(name), *arguments], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def shellcheck(script: str) -> None:
    """Lint a bash script."""
    assert_clean("shellcheck", "--shell=bash", "-", text=script)
