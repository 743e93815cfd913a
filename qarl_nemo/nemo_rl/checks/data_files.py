"""Looks for the local files that data sets of NeMo-RL's `data:` block name, before Ray starts."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.named import OWN
from qarl_nemo.data.records import local_file
from qarl_nemo.files import FileError
from qarl_nemo.nemo_rl.checks.data_sets import where
from qarl_nemo.nemo_rl.data_sets import OUR_CLASSES, data_sets, our_name
from qarl_nemo.nemo_rl.layout_memory import first_gpu_gib

# Of these NeMo-RL's own ResponseDataset knows that they are files.
_FILES = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".txt")


def file_conflicts(data: Mapping[str, Any]) -> list[str]:
    """Say which files are not there, or are of a kind that is not read.

    Args:
        data: the `data:` block.

    Returns:
        One line each: key, path, and what to set; none of files that may be where the run starts.
    """
    return [line for path, line in _missing(data) if not _may_be_elsewhere(path)]


def file_hints(data: Mapping[str, Any]) -> list[str]:
    """Say on a machine without GPUs, where a run is only checked, which files must be there where it starts.

    Args:
        data: the `data:` block.
    """
    lines = [line for path, line in _missing(data) if _may_be_elsewhere(path)]
    return [
        f"{line}. This machine has no GPU, so the run is not refused; it needs the file where it starts"
        for line in dict.fromkeys(lines)
    ]


def _may_be_elsewhere(path: Path) -> bool:
    """Tell whether this is a whole path, as to a cluster's mount, on a machine where no run starts."""
    return path.is_absolute() and not path.exists() and first_gpu_gib() is None


def _missing(data: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the path of each file that could not be read, and what to say of it."""
    for place, dataset, whole in data_sets(data):
        for key in ("prompt_file", "system_prompt_file"):
            path = whole.get(key)
            if _is_plain(path) and not Path(path).is_file():
                yield Path(path), f"{where(place, dataset, key)}={path}: {_no_prompt_file(path)}, or null for none"
        path = whole.get("data_path")
        if _is_plain(path) and (why := _unread(path, whole)):
            yield Path(path), f"{where(place, dataset, 'data_path')}{why}"


def _no_prompt_file(path: str) -> str:
    """Say that it is not there, and where it is if only NeMo-RL's folder has it, for which its recipes name it."""
    root = os.environ.get("NEMO_RL_ROOT")
    if root and (own := Path(root) / path).is_file():
        return f"there is no such file here; set NeMo-RL's, {own}, one of your own"
    return "there is no such file; set one that is there"


def _unread(path: str, whole: Mapping[str, Any]) -> str | None:
    name = whole.get("dataset_name")
    if name in OUR_CLASSES:
        try:
            local_file(DatasetConfig.model_validate({"dataset_name": our_name(whole) or OWN, "data_path": path}))
        except FileError as error:
            return f": {error}"
    elif name == OWN and Path(path).suffix in _FILES and not Path(path).exists():
        return f"={path}: there is no such file; set one that is there"
    return None


def _is_plain(path: Any) -> TypeGuard[str]:
    """Tell whether this is a path, and not the reference to one that only the launcher resolves."""
    return isinstance(path, str) and bool(path) and "${" not in path
