"""Checks of the single data sets of NeMo-RL's `data:` block: their classes, values and files, before Ray starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from qarl_nemo.config import ConfigError, validate
from qarl_nemo.config.problems import hint
from qarl_nemo.data.benchmarks import BENCHMARKS, find_benchmark
from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.named import OWN
from qarl_nemo.data.records import local_file
from qarl_nemo.files import FileError
from qarl_nemo.nemo_rl.data_sets import BENCHMARK, DATA_SETS, ENVIRONMENT, OUR_CLASSES, PACKAGE, READ, our_name

# Of these NeMo-RL's own ResponseDataset knows that they are files.
_FILES = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".txt")


def set_problems(place: str, dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Say why a data set could not be read, as far as its keys and the names of its files tell.

    Args:
        place: where it stands, such as `data.train.1`.
        dataset: what is written there.
        whole: that with `data.default`.

    Returns:
        One line for each problem: key, value, and what to set.
    """
    name, lines = str(whole.get("dataset_name")), _missing_prompts(place, dataset, whole)
    if name == BENCHMARK:
        return lines + _benchmark_problems(place, dataset, whole)
    if name in OUR_CLASSES:
        return lines + _own_problems(place, dataset, whole)
    if name.startswith(PACKAGE):
        lines.append(f"{_at(place, dataset, 'dataset_name')}={name}: no such data set; {hint(name, OUR_CLASSES)}")
    path = whole.get("data_path")
    if name == OWN and _is_plain(path) and Path(path).suffix in _FILES and not Path(path).exists():
        lines.append(f"{_at(place, dataset, 'data_path')}={path}: there is no such file; set one that is there")
    return lines


def benchmark_environment(dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> str | None:
    """Return the environment that checks a benchmark's answers, `null` where none is named; None if a function does.

    Args:
        dataset: what is written for the benchmark.
        whole: that with `data.default`.
    """
    # The default's function becomes the default's environment, which one of the set's own replaces.
    if dataset.get("reward_function") or (whole.get("reward_function") and "env_name" not in dataset):
        return None
    name = whole.get("env_name")
    return "null" if name is None else str(name)


def _benchmark_problems(place: str, dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    lines, name, record = [], whole.get("benchmark"), None
    if name is None:
        lines.append(f"{place}.benchmark is missing; legal: {', '.join(BENCHMARKS)}")
    else:
        try:
            record = find_benchmark(str(name))
        except ValueError as error:
            lines.append(f"{_at(place, dataset, 'benchmark')}={name}: {error}")
    repeat = whole.get("repeat", 1)
    if type(repeat) is not int or repeat < 1:
        lines.append(f"{_at(place, dataset, 'repeat')}={repeat}: set a whole number from 1")
    environment = benchmark_environment(dataset, whole)
    if environment not in (None, ENVIRONMENT):
        lines.append(
            f"{place}.env_name={environment}: the answers of a benchmark are checked in the environment {ENVIRONMENT}; "
            f"set {place}.env_name={ENVIRONMENT}, or a reward_function"
        )
    if record is not None and whole.get("data_path"):
        copy = DatasetConfig(data_path=str(whole["data_path"]), split=record.split)
        lines += _missing_data(_at(place, dataset, "data_path"), copy)
    return lines


def _own_problems(place: str, dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    named = our_name(whole)
    if named == OWN and not whole.get("data_path"):
        others = ", ".join(name for name, known in DATA_SETS.items() if known != OWN)
        return [
            f"{place}.data_path is missing: a local file or folder, or a name on the hub; without one, the class in "
            f"dataset_name is one of {others} in the place of Problems"
        ]
    # There is another sentence for reward functions.
    read = {key: whole[key] for key in READ if key in whole and key != "reward_function"}
    try:
        config = validate({"dataset_name": named} | read, DatasetConfig, source=place)
    except ConfigError as error:
        return [f"{place}: {line.strip()}" for line in str(error).splitlines()[1:]]
    return _missing_data(_at(place, dataset, "data_path"), config)


def _missing_data(place: str, config: DatasetConfig) -> list[str]:
    if not _is_plain(config.data_path):
        return []
    try:
        local_file(config)
    except FileError as error:
        return [f"{place}: {error}"]
    return []


def _missing_prompts(place: str, dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    return [
        f"{_at(place, dataset, key)}={whole[key]}: there is no such file; set one that is there, or null for none"
        for key in ("prompt_file", "system_prompt_file")
        if _is_plain(whole.get(key)) and not Path(whole[key]).is_file()
    ]


def _at(place: str, dataset: Mapping[str, Any], key: str) -> str:
    return f"{place}.{key}" if key in dataset else f"data.default.{key}"


def _is_plain(path: Any) -> TypeGuard[str]:
    """Tell whether this is a path, and not the reference to one that only the launcher resolves."""
    return isinstance(path, str) and "${" not in path
