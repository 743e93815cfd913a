"""Records of a local file, a folder or the Hugging Face hub, each with its place for errors."""

import contextlib
import csv
import io
import itertools
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.named import NAMED
from qarl_nemo.files import MAX_TEXT_BYTES, FileError, load_json, read_words, readable_bytes, text_lines
from qarl_nemo.installation import pip_command

# What `datasets` calls the readers of single files.
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_NUM_SHOWN, _MAX_QUOTED = 20, 200
_PARTS = "legal are train, train[:100], train[90%:] and several of these joined by +, with the split's own name"


def read_records(config: DatasetConfig) -> Iterator[tuple[str, Any]]:
    """Read a data set's records.

    Args:
        config: the data set's block.

    Yields:
        The record's place (`line 3`, `record 3`), and the record; for a line that is not JSON, the error.

    Raises:
        ValueError: there is no such file or split, or the hub cannot be reached.
    """
    path = local_file(config)
    if path is not None and path.suffix == ".jsonl":
        yield from _lines(path, config.split)
    elif path is not None and path.suffix == ".json":
        yield from _json(path, config.split)
    elif path is not None and path.suffix == ".csv":
        yield from _csv(path, config.split)
    else:
        dataset = _load_dataset(config, path)
        for number, record in enumerate(dataset, start=1):
            yield f"record {number}", _as_stored(record, dataset.features)


def local_file(config: DatasetConfig) -> Path | None:
    """Find the file to read.

    Args:
        config: the data set's block.

    Returns:
        The file, of a folder the one that is called as the split; None if `datasets` finds it.

    Raises:
        FileError: there is no such file or folder, or the file is of another kind than those that are read.
    """
    if config.data_path is None:
        return None
    path = Path(config.data_path)
    if path.suffix in _READERS and not path.is_dir():
        if not path.is_file():
            named = NAMED.get(config.dataset_name)
            copies = f"; data_path takes {named.copies}" if named else ""
            raise FileError(f"data file {path} does not exist{copies}")
        if path.stat().st_size == 0:
            raise FileError(f"data file {path} is empty")
        return path
    if path.is_dir():
        stems = {part.partition("[")[0].strip() for part in config.split.split("+")}
        named = [path / f"{stem}{suffix}" for stem in stems for suffix in _READERS]
        # Of several, `datasets` reads the folder.
        return next((file for file in named if file.is_file()), None) if len(stems) == 1 else None
    if path.is_file():
        raise FileError(f"data file {path} is not read; files that are end in {', '.join(_READERS)}")
    if path.is_absolute() or path.parts[:1] == ("..",) or len(path.parts) > 2:
        raise FileError(f"data folder {path} does not exist; files that are read end in {', '.join(_READERS)}")
    return None


def _as_stored(value: Any, feature: Any) -> Any:
    """Return a value whose numbers have no more digits than their column's type: 36.6, not 36.599998474121094."""
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {key: _as_stored(one, feature.get(key)) for key, one in value.items()}
    if isinstance(value, list):
        inside = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_as_stored(one, inside) for one in value]
    code = {"float16": "e", "float32": "f"}.get(getattr(feature, "dtype", ""))
    return _shortest(value, code) if code and isinstance(value, float) else value


def _shortest(value: float, code: str) -> float:
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        with contextlib.suppress(OverflowError):
            if struct.unpack(code, struct.pack(code, rounded))[0] == value:
                return rounded
    return value


def _lines(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    # A file may be larger than memory. Only a part of a split asks how many lines there are.
    num_lines = sum(1 for _ in _filled_lines(path)) if "[" in split else 0
    for part in _parts(path, split, num_lines):
        for number, line in itertools.islice(_filled_lines(path), part.start, part.stop):
            record: Any
            try:
                record = _value(line)
            except ValueError as error:
                record = error
            yield f"line {number}", record


def _filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text_lines(path, "JSONL data"), start=1) if line.strip())


def _whole(path: Path, what: str) -> str:
    if path.is_file() and (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise FileError(
            f"data file {path} has {readable_bytes(size)}, and {what} of at most {readable_bytes(MAX_TEXT_BYTES)} are "
            "read; write it as .jsonl, a record a line, or as .parquet, of which any size is read"
        )
    return read_words(path, what)


def _json(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    """Read a list, one object, or lines; `datasets` would round large integers, and make days of texts."""
    text = _whole(path, "JSON data")
    try:
        value = _value(text)
    except ValueError as error:
        first, _, rest = text.lstrip().partition("\n")
        if not rest.strip() or not _is_object(first):
            raise FileError(f"data file {path} is not JSON: {error}") from error
        yield from _lines(path, split)
        return
    yield from _numbered(path, split, value if isinstance(value, list) else [value])


def _csv(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    """Read rows of text under the names in the first one; `datasets` would make numbers, days and nothing of it."""
    csv.field_size_limit(MAX_TEXT_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(_whole(path, "CSV data"), newline=""), strict=True)
        records = list(reader)
    except csv.Error as error:
        raise FileError(f"data file {path} is not CSV: {error}") from error
    names = list(reader.fieldnames or [])
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise FileError(f"data file {path}: its first line names more than one column {', '.join(map(repr, twice))}")
    if wide := [number for number, record in enumerate(records, start=1) if None in record]:
        raise FileError(f"data file {path}, record {wide[0]}: it has more cells than the first line names")
    yield from _numbered(path, split, records)


def _numbered(path: Path, split: str, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    records = list(enumerate(values, start=1))
    for number, record in [record for part in _parts(path, split, len(records)) for record in records[part]]:
        yield f"record {number}", record


def _value(text: str) -> Any:
    value = load_json(text)
    if "\\ud" in text.lower():
        # Half of a surrogate pair is legal JSON, and no text.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _is_object(line: str) -> bool:
    try:
        return isinstance(load_json(line), dict)
    except ValueError:
        return False


def _parts(path: Path, split: str, num_records: int) -> list[slice]:
    """Return which records a split such as `train[:10%]+train[90%:]` asks for, as `datasets` reads it."""
    name, bracket, _ = split.partition("[")
    if not bracket:
        return [slice(None)]
    try:
        parts = _datasets().ReadInstruction.from_spec(split).to_absolute({name: num_records})
    except (ValueError, AssertionError) as error:
        raise FileError(
            f"{path}: split {split!r} of {num_records} records: {str(error).splitlines()[0]}; {_PARTS}"
        ) from error
    return [slice(part.from_, part.to) for part in parts]


def listed(problems: Mapping[str, Sequence[str]]) -> str:
    """Tell what is wrong with records.

    Args:
        problems: what is wrong -> the places of the records of which it is true.

    Returns:
        `line 3, line 7 and 2 more: the problem`, one after the other; the first of them if they are many.
    """
    told = []
    for problem, places in list(problems.items())[:_NUM_SHOWN]:
        more = f" and {len(places) - _NUM_SHOWN} more" if len(places) > _NUM_SHOWN else ""
        told.append(f"{', '.join(places[:_NUM_SHOWN])}{more}: {problem}")
    return "; ".join(told + [f"and {len(problems) - _NUM_SHOWN} other kinds"] * (len(problems) > _NUM_SHOWN))


def fields_of(record: Mapping[Any, Any]) -> str:
    """Return a record's fields, in parentheses, for errors."""
    return f" (its fields: {', '.join(map(str, record))[:_MAX_QUOTED] or 'none'})"


def part_of_copy(folder: Path, subset: str | None) -> tuple[str, str | None]:
    """Find one of the hub's configurations in a local copy.

    Args:
        folder: a copy of the hub's repository, or of its data alone.
        subset: the configuration; None for the only one.

    Returns:
        What `datasets` reads, and the configuration if it knows that: one that the copy's README lists, else the
        folder that is called so, else all of it.
    """
    if subset and (folder / "README.md").is_file():
        # Of a copy that cannot be read, loading it says why.
        with contextlib.suppress(Exception):
            if subset in _datasets().get_dataset_config_names(str(folder)):
                return str(folder), subset
    return str(folder / subset if subset and (folder / subset).is_dir() else folder), None


def _load_dataset(config: DatasetConfig, file: Path | None) -> Any:
    datasets, named = _datasets(), NAMED.get(config.dataset_name)
    source = str(config.data_path or (named and named.hub_path))
    subset = config.subset or (named.subset if named else None)
    is_local = config.data_path is not None and Path(source).exists()
    # Of a machine without a network, the hub's client tells each attempt.
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)
    try:
        if file is not None:
            files = {config.split.partition("[")[0]: str(file)}
            return datasets.load_dataset(_READERS[file.suffix], data_files=files, split=config.split)
        if is_local and config.subset is None:
            source, subset = part_of_copy(Path(source).resolve(), subset)
        return datasets.load_dataset(source, subset, split=config.split)
    except Exception as error:  # the loader and the hub's client raise unrelated types
        # Of a file that cannot be read, only its cause says why; a second line lists the legal configurations.
        told = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = " ".join(str(told).splitlines()[:2]) or type(told).__name__
        copies = f" ({named.copies})" if named else ""
        stem = config.split.partition("[")[0]
        inside = (
            f"; a folder holds {stem}.jsonl, or is a copy of the hub's"
            if config.subset is None and Path(source).is_dir()
            else ""
        )
        fix = inside if is_local else f"; without a network, set its data_path to a local file or folder{copies}"
        if "instruction format" in reason:
            fix = f"; {_PARTS}"
        raise FileError(
            f"dataset {source}, split {config.split!r}, cannot be loaded: {reason[:_MAX_QUOTED]}{fix}"
        ) from error
    finally:
        client.setLevel(level)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"only .jsonl files are read without the package `datasets`: {pip_command()}") from error
    return datasets
