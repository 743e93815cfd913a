"""Lists the product files that name a number format: what a new format may have to touch beside its record.

A file names a format where a string in its code, docstrings aside, is a format's name or lists several of them.
`--at REVISION` looks at another commit than the working tree.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("qarl_nemo", "kernels/qarl_formats", "kernels/qarl_kernels")
NAMES = ("w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "w8a16", "bf16")
_NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")


def format_files(revision: str | None = None) -> list[str]:
    """Return the files of a commit, or of the working tree, that name a format, sorted."""
    return sorted(path for path, text in _sources(revision) if names_a_format(text))


def names_a_format(source: str) -> bool:
    """Return whether a string of a module's code is a format's name, or lists several."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    )
    return any(text in NAMES or len(set(_NAME.findall(text))) > 1 for text in strings)


def _sources(revision: str | None) -> Iterator[tuple[str, str]]:
    if revision is None:
        for folder in FOLDERS:
            for path in (ROOT / folder).rglob("*.py"):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        return
    for path in _git("ls-tree", "-r", "--name-only", revision, *FOLDERS).splitlines():
        if path.endswith(".py"):
            yield path, _git("show", f"{revision}:{path}")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main() -> None:
    """Print the files and how many they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", metavar="REVISION", help="a commit in place of the working tree")
    found = format_files(parser.parse_args().at)
    print(*found, f"{len(found)} files", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
