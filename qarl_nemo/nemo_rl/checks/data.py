"""Checks of NeMo-RL's `data:` block, as far as this package adds to it. Does not import NeMo-RL."""

import difflib
from collections.abc import Mapping
from typing import Any

from qarl_nemo.config.problems import hint
from qarl_nemo.data.reward_function import RewardFunction
from qarl_nemo.nemo_rl.checks.data_files import file_conflicts
from qarl_nemo.nemo_rl.checks.data_keys import key_problems
from qarl_nemo.nemo_rl.checks.data_sets import chosen_environment, set_problems
from qarl_nemo.nemo_rl.data_sets import BENCHMARK, DEFAULT_WORKERS, ENVIRONMENT, data_sets, rewarded
from qarl_nemo.nemo_rl.lookup import look_up

OVERLONG = ("error", "skip", "mask")
_OVERLONG = "overlong_prompts"
# Below this similarity, a key of the block is rather another one of NeMo-RL's.
_SLIP = 0.8


def overlong_prompts(config: Mapping[str, Any]) -> str:
    """Return `data.overlong_prompts`: what happens to prompts of `data.max_input_seq_length` tokens or more."""
    return str(look_up(config, f"data.{_OVERLONG}", OVERLONG[0]))


def data_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say what in the `data:` block of a whole config cannot be used, or would be dropped in silence."""
    data = config.get("data") or {}
    problems = []
    if overlong_prompts(config) not in OVERLONG:
        problems.append(f"data.{_OVERLONG}={overlong_prompts(config)}: set {' or '.join(OVERLONG)}")
    problems += [f"data.{key}: nothing reads this key; set data.{_OVERLONG}" for key in map(str, data) if _is_slip(key)]
    problems += key_problems(data)
    problems += [line for place, dataset, whole in data_sets(data) for line in set_problems(place, dataset, whole)]
    problems += file_conflicts(data)
    for place, dataset in rewarded(data):
        path = dataset["reward_function"]
        try:
            RewardFunction(str(path))
        except ValueError as error:
            problems.append(f"{place}.reward_function={path}: {error}")
    problems += _environment_problems(data, config.get("env"))
    # What is wrong with the default is so for every set.
    return list(dict.fromkeys(problems + _worker_problems(config, data)))


def _is_slip(key: str) -> bool:
    near = difflib.get_close_matches(key, [_OVERLONG], cutoff=_SLIP)
    return key != _OVERLONG and (key.startswith("overlong") or bool(near))


def _environment_problems(data: Mapping[str, Any], env: Mapping[str, Any] | None) -> list[str]:
    if env is None:
        return []
    default = data.get("default") or {}
    known = [name for name, settings in env.items() if isinstance(settings, Mapping) and name != "reward_function"]
    # NeMo-RL starts the default's environment, too, whether or not a data set is left that uses it.
    return [
        f"{place}.env_name={'null' if dataset['env_name'] is None else dataset['env_name']}: not an environment of the "
        f"`env` block; {hint(str(dataset['env_name']), known)}"
        for place, dataset, whole in [*data_sets(data), ("data.default", default, default)]
        if "env_name" in dataset
        and dataset["env_name"] not in known
        # These have sentences of their own.
        and not dataset.get("reward_function")
        and whole.get("dataset_name") != BENCHMARK
    ]


def _worker_problems(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    asked = {"reward_function": look_up(config, "env.reward_function.num_workers", DEFAULT_WORKERS)}
    if any(
        whole.get("dataset_name") == BENCHMARK and chosen_environment(dataset, whole) == ENVIRONMENT
        for _, dataset, whole in data_sets(data)
    ):
        asked[ENVIRONMENT] = look_up(config, f"env.{ENVIRONMENT}.num_workers", None)
    return [
        f"env.{name}.num_workers={'null' if workers is None else workers}: set a whole number from 1"
        for name, workers in asked.items()
        if type(workers) is not int or workers < 1
    ]
