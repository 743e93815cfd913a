"""Walk a config's models by dotted keys, as a user writes them."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the blocks that a key of this type may hold: one model, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in models_in(part)]


def annotations(keys: list[str], models: list[type[BaseModel]]) -> list[Any]:
    """Return the types that a key may have, one for each union member that has it.

    Args:
        keys: the dotted key's parts.
        models: the blocks that may hold the first part.

    Returns:
        The types; none for an unknown key, or no key.
    """
    if not keys:
        return []
    found = [model.model_fields[keys[0]].annotation for model in models if keys[0] in model.model_fields]
    if len(keys) == 1:
        return found
    mappings = [get_args(kind)[1] for kind in found if get_origin(kind) is dict]
    if mappings and len(keys) == 2:
        return mappings
    inside = [model for kind in found for model in models_in(kind)]
    return annotations(keys[1:], inside) if inside else []


def all_keys(models: list[type[BaseModel]], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key below some blocks, nearest the top first within a block.

    Args:
        models: the blocks.
        above: the keys of their place in the config.

    Yields:
        The parts of each dotted key.
    """
    for model in models:
        for name, field in model.model_fields.items():
            yield (*above, name)
            yield from all_keys(models_in(field.annotation), (*above, name))


def discriminator(members: list[type[BaseModel]]) -> str | None:
    """Return the key that tells a union's members apart.

    Returns:
        The key with a single legal word in each member; None if there is only one member, or no such key.
    """
    if len(members) < 2:
        return None
    shared = set.intersection(*(set(member.model_fields) for member in members))
    return next((key for key in sorted(shared) if all(tag(member, key) for member in members)), None)


def tag(member: type[BaseModel], key: str) -> str | None:
    """Return the only value that a key of a block may have; None if it may have others."""
    annotation = member.model_fields[key].annotation
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    return words[0] if len(words) == 1 else None
