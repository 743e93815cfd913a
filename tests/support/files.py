"""Files that tests write and compare."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> str:
    """Write an object a line; returns the path, as configs hold it."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    """Return what every file below a folder holds, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
