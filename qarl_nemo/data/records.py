"""Records of a local file, a folder or the Hugging Face hub, each with its place for errors."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.named import NAMED
from qarl_nemo.files import FileError, load_json, read_text
from qarl_nemo.installation import pip_command

# What `datasets` calls the readers of single files.
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_MAX_QUOTED = 200


def read_records(config: DatasetConfig) -> Iterator[tuple[str, Any]]:
    """Read a data set's records.

    Args:
        config: the data set's block.

    Yields:
        The record's place (`line 3`, `record 3`), and the record; for a line that is not JSON, the error.

    Raises:
        ValueError: there is no such file or split, or the hub cannot be reached.
    """
    path = _local_file(config)
    if path is not None and path.suffix == ".jsonl":
        yield from _lines(path, config.split)
    else:
        for number, record in enumerate(_load_dataset(config, path)):
            yield f"record {number}", record


def _local_file(config: DatasetConfig) -> Path | None:
    """Return the file to read, of a folder the one that is called as the split; None if `datasets` finds it."""
    if config.data_path is None:
        return None
    path = Path(config.data_path)
    if path.suffix in _READERS:
        if not path.is_file():
            raise FileError(f"data file {path} does not exist")
        return path
    if path.is_dir():
        named = [path / f"{config.split.partition('[')[0]}{suffix}" for suffix in _READERS]
        return next((file for file in named if file.is_file()), None)
    if path.is_absolute() or path.parts[:1] == ("..",) or len(path.parts) > 2:
        raise FileError(f"data folder {path} does not exist; files that are read end in {', '.join(_READERS)}")
    return None


def _lines(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    # JSON strings may contain the other line separators that splitlines() splits at.
    lines = [line for line in enumerate(read_text(path, "JSONL data").split("\n"), start=1) if line[1].strip()]
    for number, line in lines[_part(split, len(lines))]:
        record: Any
        try:
            record = load_json(line)
        except ValueError as error:
            record = error
        yield f"line {number}", record


def _part(split: str, num_records: int) -> slice:
    """Return which records a split such as `train[:10%]` asks for, as `datasets` reads it."""
    name, bracket, _ = split.partition("[")
    if not bracket:
        return slice(None)
    try:
        (part,) = _datasets().ReadInstruction.from_spec(split).to_absolute({name: num_records})
    except (ValueError, AssertionError) as error:
        raise FileError(f"split {split!r} of {num_records} records: {str(error).splitlines()[0]}") from error
    return slice(part.from_, part.to)


def _load_dataset(config: DatasetConfig, file: Path | None) -> Any:
    datasets, named = _datasets(), NAMED.get(config.dataset_name)
    source = str(file or config.data_path or (named and named.hub_path))
    # Of a machine without a network, the hub's client tells each attempt.
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)
    try:
        if file is not None:
            files = {config.split.partition("[")[0]: source}
            return datasets.load_dataset(_READERS[file.suffix], data_files=files, split=config.split)
        return datasets.load_dataset(source, _subset(config), split=config.split)
    except Exception as error:  # the loader and the hub's client raise unrelated types
        lines = str(error).splitlines() or [type(error).__name__]
        copies = f" ({named.copies})" if named else ""
        raise FileError(
            f"dataset {source}, split {config.split!r}, cannot be loaded: {lines[0][:_MAX_QUOTED]}; without a network, "
            f"set its data_path to a local file or folder{copies}"
        ) from error
    finally:
        client.setLevel(level)


def _subset(config: DatasetConfig) -> str | None:
    named = NAMED.get(config.dataset_name)
    if config.subset or named is None:
        return config.subset
    # A folder may be a copy of the hub's repository, or hold files alone.
    is_copy = config.data_path is None or (Path(config.data_path) / (named.subset or "")).is_dir()
    return named.subset if is_copy else None


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"only .jsonl files are read without the package `datasets`: {pip_command()}") from error
    return datasets
