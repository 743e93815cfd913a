"""Checks of the single data sets of NeMo-RL's `data:` block: their classes and values, before Ray starts."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from qarl_nemo.config import ConfigError, validate
from qarl_nemo.config.problems import hint
from qarl_nemo.data.benchmarks import BENCHMARKS, find_benchmark
from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.named import OWN
from qarl_nemo.nemo_rl.data_sets import (
    BENCHMARK,
    DATA_SETS,
    ENVIRONMENT,
    OUR_CLASSES,
    PACKAGE,
    READ,
    our_name,
    reward_environment,
)

_REGISTRY = "nemo_rl.data.datasets.response_datasets"


def set_problems(place: str, dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Say why a data set could not be read, as far as its keys tell; `data_files` looks for its files.

    Args:
        place: where it stands, such as `data.train.1`.
        dataset: what is written there.
        whole: that with `data.default`.

    Returns:
        One line for each problem: key, value, and what to set.
    """
    name = str(whole.get("dataset_name"))
    if name == BENCHMARK:
        return _benchmark_problems(place, dataset, whole)
    if name in OUR_CLASSES:
        return _reward_problems(place, dataset, whole) + _own_problems(place, whole)
    if name.startswith(PACKAGE):
        return [f"{where(place, dataset, 'dataset_name')}={name}: no such data set; {hint(name, OUR_CLASSES)}"]
    legal = _nemo_rl_sets()
    # A name with a dot is a class that NeMo-RL imports.
    if legal and "dataset_name" in whole and "." not in name and name not in legal:
        classes = f"or a class, as {OUR_CLASSES[0]}"
        return [f"{where(place, dataset, 'dataset_name')}={name}: no such data set; {hint(name, legal)}; {classes}"]
    return []


def _nemo_rl_sets() -> list[str]:
    """Return the names of NeMo-RL's data sets, whose module its launcher loads before the config; else none."""
    return sorted(getattr(sys.modules.get(_REGISTRY), "DATASET_REGISTRY", ()))


def chosen_environment(dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> str | None:
    """Return the environment that checks a data set's answers, `null` where none is named; None if a function does.

    Args:
        dataset: what is written for the data set.
        whole: that with `data.default`.
    """
    # The default's function becomes the default's environment, which one of the set's own replaces.
    if dataset.get("reward_function") or (whole.get("reward_function") and "env_name" not in dataset):
        return None
    name = whole.get("env_name")
    return "null" if name is None else str(name)


def where(place: str, dataset: Mapping[str, Any], key: str) -> str:
    """Return where a data set's key stands: in it, or in the default.

    Args:
        place: where the data set stands, such as `data.train.1`.
        dataset: what is written there.
        key: the key.
    """
    return f"{place}.{key}" if key in dataset else f"data.default.{key}"


def _benchmark_problems(place: str, dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    lines, name = [], whole.get("benchmark")
    if name is None:
        lines.append(f"{place}.benchmark is missing; legal: {', '.join(BENCHMARKS)}")
    else:
        try:
            find_benchmark(str(name))
        except ValueError as error:
            lines.append(f"{where(place, dataset, 'benchmark')}={name}: {error}")
    repeat = whole.get("repeat", 1)
    if type(repeat) is not int or repeat < 1:
        lines.append(f"{where(place, dataset, 'repeat')}={json.dumps(repeat, default=str)}: set a whole number from 1")
    environment = chosen_environment(dataset, whole)
    if environment not in (None, ENVIRONMENT):
        lines.append(
            f"{place}.env_name={environment}: the answers of a benchmark are checked in the environment {ENVIRONMENT}; "
            f"set {place}.env_name={ENVIRONMENT}, or a reward_function"
        )
    return lines


def _reward_problems(place: str, dataset: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    if chosen_environment(dataset, whole) == ENVIRONMENT:
        return [
            f"{where(place, dataset, 'env_name')}={ENVIRONMENT}: that environment checks the answers of {BENCHMARK} "
            f"only; set {place}.env_name to another one, e.g. math, or a reward_function"
        ]
    path, name = dataset.get("reward_function"), dataset.get("env_name")
    # A saved config has the function's own.
    if not path or name in (None, reward_environment(path)):
        return []
    return [
        f"{place}.env_name={name}: {place}.reward_function={path} rewards in its place; set null, or no reward_function"
    ]


def _own_problems(place: str, whole: Mapping[str, Any]) -> list[str]:
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
        validate({"dataset_name": named} | read, DatasetConfig, source=place)
    except ConfigError as error:
        return [f"{place}: {line.strip()}" for line in str(error).splitlines()[1:]]
    return []
