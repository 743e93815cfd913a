"""What is left of a block once others choose another kind of it, and the dump of a config that keeps its kinds."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from qarl_nemo.config.models import discriminator, models_in, tag
from qarl_nemo.config.strict import StrictModel


def without_meaningless(
    values: Mapping[str, Any], said: Mapping[str, Any], models: list[type[BaseModel]]
) -> dict[str, Any]:
    """Drop the keys of a default that have no meaning under what is merged onto it; what is merged itself stays.

    Args:
        values: the default: what a file, one of its `defaults:` or a comparison says.
        said: what is merged onto it; where it chooses another kind of block (`loss_fn.objective`), keys that only
            other kinds have are dropped.
        models: the blocks that `values` may be.
    """
    kind = discriminator(models)
    chosen = [member for member in models if kind and tag(member, kind) == said.get(kind)]
    dropped = _foreign_keys(models, chosen[0]) if chosen else set()
    for model in models:
        if issubclass(model, StrictModel):
            dropped |= model.keys_without_meaning(said)
    kept = {key: value for key, value in values.items() if key not in dropped}
    for key, below in said.items():
        inside = [
            m for model in models if key in model.model_fields for m in models_in(model.model_fields[key].annotation)
        ]
        if isinstance(below, Mapping) and isinstance(kept.get(key), Mapping):
            kept[key] = without_meaningless(kept[key], below, inside)
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


def _foreign_keys(members: list[type[BaseModel]], chosen: type[BaseModel]) -> set[str]:
    return {key for member in members for key in member.model_fields} - set(chosen.model_fields)
