"""Whole-file writes that a kill cannot leave half done."""

import os
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name beside `path`, flushes it to disk and renames it.

    Args:
        path: final place; its folder must exist.
        content: text (written as UTF-8) or bytes.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
