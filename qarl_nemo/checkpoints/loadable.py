"""Check the rest of config.json with transformers, because engines read it the way transformers does."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch

from qarl_nemo.files import FileError
from qarl_nemo.installation import hide_broken_packages

_POSITIVE = ("rope_theta", "rms_norm_eps")
# Some versions of transformers draw initial weights before they load the file's.
_NOT_NEGATIVE = ("initializer_range",)


def require_loadable(config: Mapping[str, Any], place: str) -> None:
    """Require that transformers can read a config and could build the model that it describes.

    Raises:
        FileError: a value has the wrong type or is not finite, or transformers does not know this kind of model.
    """
    wrong = [f"{key}={value}" for key, value in _numbers(config, "") if not _is_finite(value)]
    wrong += [f"{key}={value}" for key, value in _numbers(config, "") if key.endswith(_POSITIVE) and value <= 0]
    wrong += [f"{key}={value}" for key, value in _numbers(config, "") if key.endswith(_NOT_NEGATIVE) and value < 0]
    if wrong:
        raise FileError(f"{place}: no model has {', '.join(wrong)}")
    hide_broken_packages()
    # Importing it takes a second, and only a conversion needs it. Its models would take three more.
    from transformers import CONFIG_MAPPING, GenerationConfig, __version__
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(dict(config)))
        GenerationConfig.from_model_config(settings)
        rope = settings.rope_parameters
        if rope["rope_type"] == "default":
            # As the models do, which takes neither text nor an integer beyond 64 bits.
            rope["rope_theta"] ** torch.ones(1)
        else:
            ROPE_INIT_FUNCTIONS[rope["rope_type"]](settings)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise FileError(f"{place}: transformers {__version__} cannot build a model of it ({reason})") from error
    wrong = _model_problems(settings)
    if wrong:
        raise FileError(f"{place}: no engine loads {', '.join(wrong)}")


def _model_problems(settings: Any) -> list[str]:
    """Say what transformers leaves to its models, or to vLLM's, to find."""
    wrong = []
    if settings.hidden_act != "silu":
        wrong.append(f"hidden_act={settings.hidden_act} (silu)")
    if not isinstance(settings.dtype, torch.dtype | None):
        wrong.append(f"dtype={settings.dtype} (bfloat16)")
    pad, size = settings.pad_token_id, settings.vocab_size
    if pad is not None and not -size <= pad < size:
        wrong.append(f"pad_token_id={pad} (below vocab_size={size})")
    return wrong


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
