"""What is left of a block once others choose another kind of it, and the dump of a config that keeps its kinds."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from qarl_nemo.config.models import discriminator, models_in, tag
from qarl_nemo.config.strict import StrictModel


def without_meaningless(
    values: Mapping[str, Any], said: Mapping[str, Any], models: list[type[BaseModel]], *, anew: bool
) -> dict[str, Any]:
    """Drop the keys of a default that have no meaning under what is merged onto it; what is merged itself stays.

    Args:
        values: the default: what a file, one of its `defaults:` or a comparison says.
        said: what is merged onto it; where it chooses another kind of block (`loss_fn.objective`), keys that only
            other kinds have are dropped.
        models: the blocks that `values` may be.
        anew: also drop keys that both kinds have and no base of both declares: under one name, they mean other things.
            The clip lines of `grpo_tis` are for tokens, those of `gspo` for responses; `rollout.batch_size` is shared.
    """
    dropped = _meant_otherwise(values, said, models, anew=anew)
    for model in models:
        if issubclass(model, StrictModel):
            dropped |= model.keys_without_meaning(said)
    kept = {key: value for key, value in values.items() if key not in dropped}
    for key, below in said.items():
        inside = [
            m for model in models if key in model.model_fields for m in models_in(model.model_fields[key].annotation)
        ]
        if isinstance(below, Mapping) and isinstance(kept.get(key), Mapping):
            kept[key] = without_meaningless(kept[key], below, inside, anew=anew)
    return kept


def dump_as_written(block: BaseModel) -> dict[str, Any]:
    """Dump what was set, and of which kind each block is.

    Onto this another kind of block can be merged, without the defaults of the kind that it replaces.
    """
    values = block.model_dump(mode="json", exclude_unset=True)
    for key, value in block:
        if isinstance(value, BaseModel):
            below = dump_as_written(value)
            values |= {key: below} if below else {}
        elif tag(type(block), key):
            values[key] = value
    return values


def _meant_otherwise(
    values: Mapping[str, Any], said: Mapping[str, Any], members: list[type[BaseModel]], *, anew: bool
) -> set[str]:
    """Return the keys of a union's members that another kind of block gives up; unknown ones stay, to be refused."""
    kind = discriminator(members)
    if kind is None:
        return set()
    tagged = {tag(member, kind): member for member in members}
    before, chosen = (tagged.get(str(block.get(kind))) for block in (values, said))
    if chosen is None:
        return set()
    kept = set(chosen.model_fields)
    if anew and before is not None and before is not chosen:
        kept = {key for base in chosen.__mro__ if base in before.__mro__ for key in _fields(base)}
    return {key for member in members for key in member.model_fields} - kept


def _fields(base: type) -> set[str]:
    return set(base.model_fields) if issubclass(base, BaseModel) else set()
