"""Docstrings say what an argument is, not only what it is of; ruff checks everything else about them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("examples", "kernels", "qarl_nemo", "tests", "tools")
ENTRY_OF = re.compile(r"\s+\w+: of ")


def test_no_entry_begins_with_of():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if ENTRY_OF.match(line)
    ]
    assert found == []


def test_such_an_entry_is_recognized():
    assert ENTRY_OF.match("        device: of the result.")
    assert not ENTRY_OF.match("        device: where the result goes, of any kind: of a GPU too.")
