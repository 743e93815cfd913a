"""How many prompts of the validation set NeMo-RL asks: whole batches, and at most a given number of prompts."""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from qarl_nemo.data.benchmarks import find_benchmark
from qarl_nemo.data.named import OWN
from qarl_nemo.nemo_rl.data_sets import BENCHMARK, data_sets, our_name
from qarl_nemo.nemo_rl.lookup import look_up

_MOST, _BATCH = "grpo.max_val_samples", "grpo.val_batch_size"
_STOP, _ANSWERS = "grpo.stop_at_validation_metric", "grpo.val_num_generations_per_prompt"
# NeMo-RL's default of both, and of `grpo.val_period`.
_USUAL, _USUAL_PERIOD = 256, 10


class Validation(NamedTuple):
    """How much of a validation set NeMo-RL asks.

    Attributes:
        most: the largest number of prompts.
        batch: the prompts of a batch.
    """

    most: int
    batch: int

    @property
    def asked(self) -> int:
        """The number of prompts that are asked, the first ones, in whole batches."""
        return self.most // self.batch * self.batch

    def needed(self, count: int) -> int:
        """Return the smallest `grpo.max_val_samples` with which so many prompts are all asked."""
        return ceil(count / self.batch) * self.batch


def read_validation(config: Mapping[str, Any]) -> Validation | None:
    """Read how much of the validation set is asked.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, or its blocks `grpo` and `env`.

    Returns:
        The sizes; None where NeMo-RL does not validate by them, or cannot.
    """
    sizes = [look_up(config, key, _USUAL) for key in (_MOST, _BATCH)]
    return Validation(*sizes) if _validates(config) and all(map(_is_count, sizes)) else None


def validation_batch_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say which sizes NeMo-RL could not validate with, or would ask nothing with and report an accuracy of 0.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: keys, values, why, and what to set.
    """
    if _validates(config) and not _validates_with_something(config.get("data") or {}):
        return [
            "data.validation: missing, and no training set has a split_validation_size, while grpo.val_period, "
            "val_at_start or val_at_end asks NeMo-RL to validate; set one, or grpo.val_period=0 and the other two false"
        ]
    validation = read_validation(config)
    if validation is None:
        return _unusable_sizes(config) if _validates(config) else []
    most, batch = validation
    if batch <= most:
        return []
    return [
        f"{_BATCH}={batch}: more than {_MOST}={most}, of which NeMo-RL asks whole batches only, so none, and the "
        f"accuracy would be 0; set at most {most}, or {_MOST}={batch}, or grpo.val_period=0 to validate nothing"
    ]


def validation_metrics(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what NeMo-RL's validation measures.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Source: NeMo-RL 7ea279ab, `validate` in `algorithms/grpo.py`.
    """
    answers = look_up(config, _ANSWERS, 1)
    return ("accuracy", "avg_length", *(["pass_k"] if type(answers) is int and answers > 1 else []))


def stop_metric_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say where NeMo-RL would end at its first validation because it does not measure what is to stop it.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        One line each: key, value, and what to set.
    """
    problems, name, answers = [], look_up(config, _STOP, None), look_up(config, _ANSWERS, 1)
    if type(answers) is not int or answers < 1:
        problems.append(f"{_ANSWERS}={'null' if answers is None else answers}: set a whole number from 1")
    legal = validation_metrics(config)
    if name is not None and name not in legal:
        beside = f", or pass_k with {_ANSWERS} of 2 or more" if "pass_k" not in legal else ""
        problems.append(
            f"{_STOP}={name}: NeMo-RL ends at its first validation, which has no such metric; set "
            f"{' or '.join(legal)}{beside}, or null"
        )
    return problems


def validation_hints(config: Mapping[str, Any]) -> list[str]:
    """Say where NeMo-RL asks only some of the validation set.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without conflicts.

    Returns:
        No line, or one: how many prompts there are, how many are asked, and what to set for all.
    """
    validation = read_validation(config)
    if validation is None:
        return []
    length = _length(config.get("data") or {})
    wanted = validation.most if length is None else length
    if validation.asked >= wanted:
        return []
    there = "" if length is None else f"of the {length} prompts of data.validation "
    return [
        f"{_MOST}={validation.most}, {_BATCH}={validation.batch}: {there}NeMo-RL asks the first {validation.asked}, in "
        f"whole batches; for all set {_MOST}={validation.needed(wanted)}"
    ]


def _validates(config: Mapping[str, Any]) -> bool:
    """Tell whether NeMo-RL validates."""
    often = look_up(config, "grpo.val_period", _USUAL_PERIOD)
    at_ends = look_up(config, "grpo.val_at_start", False) or look_up(config, "grpo.val_at_end", False)
    # NeMo-RL's own, which a negative period turns off, too.
    return bool((isinstance(often, int) and often > 0) or at_ends)


def _validates_with_something(data: Mapping[str, Any]) -> bool:
    # NeMo-RL asserts it in `setup`, when Ray has started. Without training data there is more to say, and it does.
    sets = [(place, whole) for place, _, whole in data_sets(data)]
    return not sets or any(
        place.startswith("data.validation") or whole.get("split_validation_size") for place, whole in sets
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _unusable_sizes(config: Mapping[str, Any]) -> list[str]:
    sizes = {key: look_up(config, key, _USUAL) for key in (_MOST, _BATCH)}
    return [
        f"{key}={'null' if value is None else value}: NeMo-RL asks {_MOST} // {_BATCH} batches; set a whole number "
        "from 1, or grpo.val_period=0 to validate nothing"
        for key, value in sizes.items()
        if not _is_count(value)
    ]


def _length(data: Mapping[str, Any]) -> int | None:
    """Return how many prompts a `data:` block validates with; None where only reading the data would tell."""
    sets = [(place, whole) for place, _, whole in data_sets(data)]
    if any(place.startswith("data.train") and whole.get("split_validation_size") for place, whole in sets):
        # That part of the training set comes before the validation set.
        return None
    lengths = [_prompts(whole) for place, whole in sets if place.startswith("data.validation")]
    return None if not lengths or None in lengths else sum(length for length in lengths if length is not None)


def _prompts(dataset: Mapping[str, Any]) -> int | None:
    name, lines = str(dataset.get("dataset_name")), _lines(dataset.get("data_path"))
    # These have a problem a line; other data sets may leave some out.
    if name == OWN or our_name(dataset) is not None:
        return lines if dataset.get("split") in (None, "train") else None
    if name != BENCHMARK:
        return None
    try:
        record = find_benchmark(str(dataset.get("benchmark")))
    except ValueError:
        # The data set says so itself.
        return None
    return (lines or record.num_problems) * dataset.get("repeat", 1)


def _lines(path: str | None) -> int | None:
    """Return how many records a local file of one a line has; None for any other place."""
    file = Path(path or "")
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as opened:
        return sum(bool(line.strip()) for line in opened)
