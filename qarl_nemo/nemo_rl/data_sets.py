"""The data sets of NeMo-RL's `data:` block: their defaults, reward functions and names. Does not import NeMo-RL."""

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import PurePath
from typing import Any

from qarl_nemo.data.named import OWN
from qarl_nemo.nemo_rl.lookup import look_up

PACKAGE = "qarl_nemo."
BENCHMARK = "qarl_nemo.nemo_rl.benchmark.Benchmark"
# Classes of `problems.py`, and which data set each is.
DATA_SETS = {"Problems": OWN, "GSM8K": "gsm8k", "MATH": "math", "OpenR1Math46K": "openr1_math"}
_CLASSES = {f"qarl_nemo.nemo_rl.problems.{name}": named for name, named in DATA_SETS.items()}
OUR_CLASSES = (*_CLASSES, BENCHMARK)
# What the classes of `problems.py` read of a data set's keys; the rest is NeMo-RL's.
READ = ("data_path", "subset", "split", "input_key", "output_key", "answer_format", "reward_function")
# The environment of benchmarks: the name under which `env:` configures it and data sets ask for it.
ENVIRONMENT = "qarl_benchmark"
DEFAULT_WORKERS = 8


def data_sets(data: Mapping[str, Any]) -> Iterator[tuple[str, MutableMapping[str, Any], dict[str, Any]]]:
    """Yield the data sets of a `data:` block.

    Args:
        data: the block.

    Yields:
        The place (`data.train.1`), what is written there, and that with `data.default`, as NeMo-RL merges the two.
    """
    default = data.get("default") or {}
    for key in ("train", "validation"):
        for place, dataset in _entries(data, key):
            yield place, dataset, {**default, **dataset}


def rewarded(data: Mapping[str, Any]) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """Yield the data sets with a `reward_function` of their own, the default too, and their places."""
    for key in ("train", "validation", "default"):
        for place, dataset in _entries(data, key):
            if dataset.get("reward_function"):
                yield place, dataset


def reward_environment(path: str) -> str:
    """Return the name of the environment that calls a reward function.

    Args:
        path: `module:function`.
    """
    return f"reward_function {path}"


def starts_environment(data: Mapping[str, Any], name: str) -> bool:
    """Return whether NeMo-RL starts an environment: a data set names it, or the default, and no function replaces it.

    Args:
        data: the `data:` block.
        name: the environment's.
    """
    named = (dataset for key in ("train", "validation", "default") for _, dataset in _entries(data, key))
    return any(dataset.get("env_name") == name and not dataset.get("reward_function") for dataset in named)


def our_name(dataset: Mapping[str, Any]) -> str | None:
    """Return the name of a data set of `problems.py` as `DatasetConfig` has it; None for any other."""
    return _CLASSES.get(str(dataset.get("dataset_name")))


def use_reward_functions(data: Mapping[str, Any], env: MutableMapping[str, Any]) -> list[str]:
    """Give every data set with a `reward_function` an environment that calls it.

    Args:
        data: the `data:` block; `env_name` of these data sets is set.
        env: the `env:` block; the environments' settings are added.

    Returns:
        The environments' names.
    """
    names, workers = [], look_up(env, "reward_function.num_workers", DEFAULT_WORKERS)
    for _, dataset in rewarded(data):
        name = reward_environment(dataset["reward_function"])
        env[name] = {"reward_function": dataset["reward_function"], "num_workers": workers}
        dataset["env_name"] = name
        names.append(name)
    return list(dict.fromkeys(names))


def name_data_sets(data: Mapping[str, Any]) -> None:
    """Give every data set of ours a `task_name` that no other has: NeMo-RL finds prompt and environment by it.

    Args:
        data: the `data:` block; a set that is named again, for instance with another prompt, gets a number.
    """
    taken: Counter[str] = Counter()
    for _, dataset, whole in data_sets(data):
        if whole.get("dataset_name") not in OUR_CLASSES:
            continue
        own = our_name(whole)
        title = whole.get("data_path") if own == OWN else own
        name = str(whole.get("benchmark")) if own is None else task_name(str(title), whole.get("split") or "train")
        taken[name] += 1
        dataset["task_name"] = name if taken[name] == 1 else f"{name}#{taken[name]}"


def task_name(title: str, split: str) -> str:
    """Return what NeMo-RL calls a data set; it is part of a file's name, so that it has no slash.

    Args:
        title: a path, or a name.
        split: the split, or a part of it.
    """
    return f"{'-'.join(part for part in PurePath(title).parts[-2:] if part != '/')}-{split}"


def _entries(data: Mapping[str, Any], key: str) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    found = data.get(key)
    several = isinstance(found, list)
    for number, dataset in enumerate(found if several else [found]):
        if isinstance(dataset, MutableMapping):
            yield f"data.{key}.{number}" if several else f"data.{key}", dataset
