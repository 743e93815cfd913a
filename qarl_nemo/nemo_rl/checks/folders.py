"""Looks whether a run can write its logs and checkpoints, before Ray starts and a first checkpoint is due."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qarl_nemo.nemo_rl.layout_memory import first_gpu_gib
from qarl_nemo.nemo_rl.lookup import look_up

_LOGS, _CHECKPOINTS = "logger.log_dir", "checkpointing.checkpoint_dir"
_FIX = "set a folder that this user may write"


def folder_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which folders of a run cannot be written.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, path, why, and what to set; none of folders that may be writable where the run starts.
    """
    return [f"{line}; {_FIX}" for path, line in _unwritable(config) if not _may_be_elsewhere(path)]


def folder_hints(config: Mapping[str, Any]) -> list[str]:
    """Say on a machine without GPUs, where a run is only checked, which folders must be writable where it starts.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.
    """
    return [
        f"{line}; {_FIX}. This machine has no GPU, so the run is not refused; it needs the folder where it starts"
        for path, line in _unwritable(config)
        if _may_be_elsewhere(path)
    ]


def _may_be_elsewhere(path: Path) -> bool:
    """Tell whether this is a whole path, as to a cluster's mount, on a machine where no run starts."""
    return path.is_absolute() and not os.path.exists(path) and first_gpu_gib() is None


def _unwritable(config: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    keys = [_LOGS] + [_CHECKPOINTS] * bool(look_up(config, "checkpointing.enabled", False))
    for key in keys:
        given = look_up(config, key, None)
        # A reference is resolved by the launcher alone.
        if isinstance(given, str) and given and "${" not in given and (why := _problem(Path(given))):
            yield Path(given), f"{key}={given}: {why}"


def _problem(path: Path) -> str | None:
    # Unlike Path.exists it does not end at a folder that cannot be entered.
    nearest = next((each for each in (path, *path.parents) if os.path.exists(each)), Path())
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    try:
        # Permissions alone do not tell: of a read-only mount, a full quota, or a root that NFS does not trust.
        with tempfile.TemporaryDirectory(prefix=".qarl-", dir=nearest):
            return None
    except OSError as error:
        return f"nothing can be written in {nearest} ({error.strerror})"
