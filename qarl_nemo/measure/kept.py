"""What a command measured stays beside what it measures next with other settings."""

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from qarl_nemo.files import FileError, read_json


def keep_others(file: Path, settings: Mapping[str, Any], *suffixes: str) -> None:
    """Rename a file of other settings to `NAME-1.json`, or the next number that is free.

    Args:
        file: JSON in which `settings` says what was measured; it need not exist.
        settings: what will be written there next.
        suffixes: those of files of the same name that stay beside it, such as `.png`.
    """
    if not file.exists():
        return
    try:
        if read_json(file, "an earlier measurement").get("settings") == json.loads(json.dumps(settings, default=str)):
            return
    except FileError:
        # Whatever it is, it is not ours to lose.
        pass
    kept = (file.with_name(f"{file.stem}-{number}") for number in count(1))
    name = next(name for name in kept if not name.with_name(f"{name.name}.json").exists())
    for suffix in (*suffixes, ".json"):
        if (old := file.with_name(f"{file.stem}{suffix}")).exists():
            old.rename(name.with_name(f"{name.name}{suffix}"))
