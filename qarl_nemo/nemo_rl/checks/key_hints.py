"""Names keys of a config that look like misspelt ones of NeMo-RL, which ignores those that none of its parts reads.

What NeMo-RL knows is read from the types of its own config. They are complete for few blocks; in the others an unknown
key is worth a hint only where a known one of the same block is nearly the same, or means the same. NeMo-RL's own
recipes get none.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

# `expert_parallel_size` is that near to `expert_model_parallel_size`; `val_temperature` is not to `temperature`.
_SLIP = 0.85
# A block whose keys depend on another key's value, and so are not in the config's type -> where those of vLLM are.
_VLLM = {"policy.generation": ("nemo_rl.models.generation.vllm.config", "VllmConfig")}

# What other trainers call a key -> NeMo-RL's, wherever a block has that one.
_SYNONYMS = {
    "learning_rate": ("lr",),
    "tp": ("tensor_parallel_size", "tensor_model_parallel_size"),
    "pp": ("pipeline_parallel_size", "pipeline_model_parallel_size"),
    "ep": ("expert_parallel_size", "expert_model_parallel_size"),
    "clip_ratio": ("ratio_clip_min", "ratio_clip_max"),
    "max_model_length": ("max_model_len",),
}
# Blocks whose types name every key that the recipes of NeMo-RL 7ea279ab and ours have, except for `_UNTYPED`.
_COMPLETE = ("", "loss_fn", "grpo", "cluster", "checkpointing", "logger")
_UNTYPED = (
    "qarl",
    "async_rl",
    "grpo.invalid_tool_call_strategy",
    "grpo.penalize_invalid_tool_call",
    "grpo.penalize_malformed_thinking",
)


def key_hints(config: Mapping[str, Any], types: Mapping[str, type]) -> list[str]:
    """Say which keys are probably misspelt, or none of NeMo-RL's.

    Args:
        config: the whole config as it was given, as nested dictionaries.
        types: the type of the whole config under the empty name, and further types of blocks under their dotted keys.

    Returns:
        One line each: the dotted key, and the known one that was probably meant, if there is one.
    """
    return list(_block_hints(config, [types[""]], types, ()))


def config_types(master_config: type) -> dict[str, type]:
    """Return the types of a run's config, for `key_hints`.

    Args:
        master_config: NeMo-RL's `MasterConfig`.
    """
    found = {"": master_config}
    for place, (module, name) in _VLLM.items():
        try:
            found[place] = getattr(import_module(module), name)
        # Without it, that block's own keys get no hints.
        except (ImportError, AttributeError):
            continue
    return found


def _block_hints(
    block: Mapping[str, Any], own: Sequence[type], types: Mapping[str, type], place: tuple[str, ...]
) -> Iterator[str]:
    known = _fields(own)
    for key, value in block.items():
        here = (*place, str(key))
        dotted = ".".join(here)
        if key not in known:
            yield from _unknown_key(dotted, known)
            continue
        inner = _blocks(known[key]) + ([types[dotted]] if dotted in types else [])
        if isinstance(value, Mapping) and inner:
            yield from _block_hints(value, inner, types, here)


def _unknown_key(dotted: str, known: Iterable[str]) -> Iterator[str]:
    block, _, key = dotted.rpartition(".")
    meant = [name for name in _SYNONYMS.get(key, ()) if name in known]
    meant = meant or difflib.get_close_matches(key, known, n=1, cutoff=_SLIP)
    if meant:
        yield f"{dotted}: no key that NeMo-RL's config has, and probably ignored; did you mean {' and '.join(meant)}?"
    elif block in _COMPLETE and dotted not in _UNTYPED:
        yield f"{dotted}: NeMo-RL has no such key, and probably ignores it; remove it"


def _fields(types: Sequence[type]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in types:
        for name, hint in get_type_hints(each).items():
            found[name] = Union[found[name], hint] if name in found else hint  # noqa: UP007
    return found


def _blocks(hint: Any) -> list[type]:
    """Return the types with named keys that a value may have; none where a mapping of any keys is legal."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any((get_origin(each) or each) in (dict, Mapping, Any) for each in options):
        return []
    return [each for each in options if each is not NoneType and isinstance(each, type) and _has_keys(each)]


def _has_keys(kind: type) -> bool:
    return hasattr(kind, "__total__") or issubclass(kind, BaseModel)
