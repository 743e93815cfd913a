"""Check the rest of config.json with transformers, because engines read it the way transformers does."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch

from qarl_nemo.files import FileError

_POSITIVE = ("rope_theta", "rms_norm_eps")


def require_loadable(config: Mapping[str, Any], place: str) -> None:
    """Require that transformers can build the model that a config describes, without weights.

    Args:
        config: content of config.json.
        place: its path, for the error.

    Raises:
        FileError: a value has the wrong type or is not finite, or transformers does not know this kind of model.
    """
    wrong = [f"{key}={value}" for key, value in _numbers(config, "") if not _is_finite(value)]
    wrong += [f"{key}={value}" for key, value in _numbers(config, "") if key.endswith(_POSITIVE) and value <= 0]
    if wrong:
        raise FileError(f"{place}: no model has {', '.join(wrong)}")
    # Importing it takes seconds, and only a conversion needs it.
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(dict(config)))
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(settings)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise FileError(f"{place}: transformers {__version__} cannot build a model of it ({reason})") from error


def _numbers(tree: Any, key: str) -> Iterator[tuple[str, float]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _numbers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for value in tree:
            yield from _numbers(value, key)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield key, tree


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
