"""Checks and readings of NeMo-RL's `data:` block, as far as this package adds to it. Does not import NeMo-RL."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from qarl_nemo.config import ConfigError, validate
from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.named import OWN
from qarl_nemo.data.reward_function import RewardFunction
from qarl_nemo.nemo_rl.lookup import look_up

OVERLONG = ("error", "skip", "mask")
_DEFAULT_WORKERS = 8
# Classes of `problems.py`, and which data set each is.
DATA_SETS = {"Problems": OWN, "GSM8K": "gsm8k", "MATH": "math", "OpenR1Math46K": "openr1_math"}
# What they read of a data set's keys; the rest is NeMo-RL's.
READ = ("data_path", "subset", "split", "input_key", "output_key", "answer_format", "reward_function")
_MODULE = "qarl_nemo.nemo_rl.problems."


def overlong_prompts(config: Mapping[str, Any]) -> str:
    """Return `data.overlong_prompts`: what happens to prompts of `data.max_input_seq_length` tokens or more."""
    return str(look_up(config, "data.overlong_prompts", OVERLONG[0]))


def data_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which keys of this package in the `data:` block of a whole config cannot be used."""
    problems = []
    if overlong_prompts(config) not in OVERLONG:
        problems.append(f"data.overlong_prompts={overlong_prompts(config)}: set {' or '.join(OVERLONG)}")
    data = config.get("data") or {}
    problems += [line for place, dataset in _sets(data) for line in _set_problems(place, dataset)]
    for place, dataset in _rewarded(data):
        path = dataset["reward_function"]
        try:
            RewardFunction(str(path))
        except ValueError as error:
            problems.append(f"{place}.reward_function={path}: {error}")
    workers = look_up(config, "env.reward_function.num_workers", _DEFAULT_WORKERS)
    if not isinstance(workers, int) or workers < 1:
        problems.append(f"env.reward_function.num_workers={workers}: set a whole number from 1")
    return problems


def use_reward_functions(data: Mapping[str, Any], env: MutableMapping[str, Any]) -> list[str]:
    """Give every data set with a `reward_function` an environment that calls it.

    Args:
        data: the `data:` block; `env_name` of these data sets is set.
        env: the `env:` block; the environments' settings are added.

    Returns:
        The environments' names.
    """
    names, workers = [], look_up(env, "reward_function.num_workers", _DEFAULT_WORKERS)
    for _, dataset in _rewarded(data):
        name = f"reward_function {dataset['reward_function']}"
        env[name] = {"reward_function": dataset["reward_function"], "num_workers": workers}
        dataset["env_name"] = name
        names.append(name)
    return list(dict.fromkeys(names))


def _set_problems(place: str, dataset: Mapping[str, Any]) -> list[str]:
    """Say why a data set of ours could not be read, as far as its keys tell."""
    name = str(dataset.get("dataset_name"))
    named = DATA_SETS.get(name.removeprefix(_MODULE)) if name.startswith(_MODULE) else None
    if named is None:
        return []
    # There is another sentence for reward functions.
    read = {key: dataset[key] for key in READ if key in dataset and key != "reward_function"}
    try:
        validate({"dataset_name": named} | read, DatasetConfig, source=place)
    except ConfigError as error:
        return [f"{place}: {line.strip()}" for line in str(error).splitlines()[1:]]
    return []


def _rewarded(data: Mapping[str, Any]) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """Yield the data sets with a `reward_function` and their places."""
    for place, dataset in _sets(data):
        if dataset.get("reward_function"):
            yield place, dataset


def _sets(data: Mapping[str, Any]) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """Yield the data sets of a `data:` block and their places."""
    for key in ("train", "validation", "default"):
        found = data.get(key)
        several = isinstance(found, list)
        for number, dataset in enumerate(found if several else [found]):
            if isinstance(dataset, MutableMapping):
                yield f"data.{key}.{number}" if several else f"data.{key}", dataset
