"""Names keys of a config that look like misspelt ones of NeMo-RL, which ignores those that none of its parts reads.

What NeMo-RL knows is read from the types of its own config. They are not complete, so that an unknown key is worth a
hint only where a known one of the same block is nearly the same; NeMo-RL's own recipes get none.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

# `expert_parallel_size` is that near to `expert_model_parallel_size`; `val_temperature` is not to `temperature`.
_SLIP = 0.85
# A block whose keys depend on another key's value, and so are not in the config's type -> where those of vLLM are.
_VLLM = {"policy.generation": ("nemo_rl.models.generation.vllm.config", "VllmConfig")}


def key_hints(config: Mapping[str, Any], types: Mapping[str, type]) -> list[str]:
    """Say which keys are probably misspelt.

    Args:
        config: the whole config as it was given, as nested dictionaries.
        types: the type of the whole config under the empty name, and further types of blocks under their dotted keys.

    Returns:
        One line each: the dotted key and the nearest known one.
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
            near = difflib.get_close_matches(here[-1], known, n=1, cutoff=_SLIP)
            yield from (
                f"{dotted}: no key that NeMo-RL's config has, and probably ignored; did you mean {one}?" for one in near
            )
            continue
        inner = _blocks(known[key]) + ([types[dotted]] if dotted in types else [])
        if isinstance(value, Mapping) and inner:
            yield from _block_hints(value, inner, types, here)


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
