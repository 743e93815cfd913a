"""How many prompts of the validation set NeMo-RL asks: whole batches, and at most a given number of prompts."""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from qarl_nemo.data.benchmarks import find_benchmark
from qarl_nemo.nemo_rl.data_checks import DATA_SETS
from qarl_nemo.nemo_rl.lookup import look_up

_MOST, _BATCH = "grpo.max_val_samples", "grpo.val_batch_size"
# NeMo-RL's default of both, and of `grpo.val_period`.
_USUAL, _USUAL_PERIOD = 256, 10
_BENCHMARK = "qarl_nemo.nemo_rl.benchmark.Benchmark"
# Data sets with a problem a line; others may leave some out.
_LINE_BY_LINE = ("ResponseDataset", *(f"qarl_nemo.nemo_rl.problems.{name}" for name in DATA_SETS))


def validation_batch_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Say where batches are so large that NeMo-RL would validate nothing, and report an accuracy of 0.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        No line, or one: keys, values, why, and what to set.
    """
    sizes = _sizes(config)
    if sizes is None or sizes[1] <= sizes[0]:
        return []
    most, batch = sizes
    smaller = f"at most {most}, or " if most > 0 else ""
    return [
        f"{_BATCH}={batch}: more than {_MOST}={most}, of which NeMo-RL asks whole batches only, so none, and the "
        f"accuracy would be 0; set {smaller}{_MOST}={batch}, or grpo.val_period=0 to validate nothing"
    ]


def validation_hints(config: Mapping[str, Any]) -> list[str]:
    """Say where NeMo-RL asks only some of the validation set.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without conflicts.

    Returns:
        No line, or one: how many prompts there are, how many are asked, and what to set for all.
    """
    sizes = _sizes(config)
    if sizes is None:
        return []
    most, batch = sizes
    used, length = most // batch * batch, _length(config.get("data") or {})
    wanted = most if length is None else length
    if used >= wanted:
        return []
    there = "" if length is None else f"of the {length} prompts of data.validation "
    return [
        f"{_MOST}={most}, {_BATCH}={batch}: {there}NeMo-RL asks the first {used}, in whole batches; for all set "
        f"{_MOST}={ceil(wanted / batch) * batch}"
    ]


def _sizes(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the largest number of prompts and that of a batch; None where NeMo-RL does not validate by them."""
    often = look_up(config, "grpo.val_period", _USUAL_PERIOD)
    at_ends = look_up(config, "grpo.val_at_start", False) or look_up(config, "grpo.val_at_end", False)
    if look_up(config, "env.should_use_nemo_gym", False) or not (often or at_ends):
        return None
    most, batch = (look_up(config, key, _USUAL) for key in (_MOST, _BATCH))
    return (most, batch) if isinstance(most, int) and isinstance(batch, int) and batch > 0 else None


def _length(data: Mapping[str, Any]) -> int | None:
    """Return how many prompts a `data:` block validates with; None where only reading the data would tell."""
    if any(dataset.get("split_validation_size") for dataset in _sets(data, "train")):
        # That part of the training set comes before the validation set.
        return None
    lengths = [_prompts(dataset) for dataset in _sets(data, "validation")]
    return None if not lengths or None in lengths else sum(length for length in lengths if length is not None)


def _sets(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the data sets of a key, with what `default` says for all."""
    found, default = data.get(key) or (), data.get("default") or {}
    several = [found] if isinstance(found, Mapping) else found
    return [{**default, **dataset} for dataset in several if isinstance(dataset, Mapping)]


def _prompts(dataset: Mapping[str, Any]) -> int | None:
    name, lines = str(dataset.get("dataset_name")), _lines(dataset.get("data_path"))
    if name in _LINE_BY_LINE:
        return lines if dataset.get("split") in (None, "train") else None
    if name != _BENCHMARK:
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
