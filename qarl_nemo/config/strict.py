"""The base of every config block: unknown keys and values out of bounds are errors, and nothing is rewritten."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator


class StrictModel(BaseModel):
    """A config block: unknown keys are errors, numbers are finite, and values are not rewritten, but for `InHome`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def numbers_are_no_booleans(cls, values: Any) -> Any:
        """Refuse true and false, and what YAML reads as these, where a number is meant: they would count as 1 and 0."""
        if not isinstance(values, dict):
            return values
        wrong = [
            f"{key}={json.dumps(value)} is no number"
            if isinstance(value, bool)
            else f"{key} holds {json.dumps(truth)}, no number"
            for key, value in values.items()
            for truth in _booleans(value)
            if cls._is_number(key)
        ]
        if wrong:
            raise ValueError("; ".join(dict.fromkeys(wrong)))
        return values

    @classmethod
    def _is_number(cls, key: str) -> bool:
        field = cls.model_fields.get(key)
        kinds = _kinds(field.annotation) if field else set()
        return bool(kinds & {int, float}) and bool not in kinds

    @classmethod
    def keys_without_meaning(cls, said: Mapping[str, Any]) -> set[str]:  # noqa: ARG003 blocks that have some look at it
        """Return the keys of a default that mean nothing once others of this block are set.

        They made sense with what the default says, so they are dropped instead of refused.

        Args:
            said: what a file, an arm of a comparison or the command line sets.

        Returns:
            The keys; none unless a block overrides this.
        """
        return set()


def _with_home(path: Any) -> Any:
    # A shell leaves `policy.model_path=~/model` as it is, and a folder called ~ is nobody's wish.
    return type(path)(os.path.expanduser(path)) if isinstance(path, str | Path) else path


InHome = AfterValidator(_with_home)
"""Marks a field, text or a path, that may begin with `~` for the home folder."""


def not_null(instead: str) -> BeforeValidator:
    """Mark a field that has no null, though NeMo-RL's of that name does.

    Args:
        instead: what the error says: what holds here, and what to set.
    """

    def refuse_null(value: Any) -> Any:
        if value is None:
            raise ValueError(instead)
        return value

    return BeforeValidator(refuse_null)


def _booleans(value: Any) -> Iterator[bool]:
    if isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _booleans(item)


def _kinds(form: Any) -> set[Any]:
    """Return the types that a field may hold, by itself or in lists; each may have bounds of its own."""
    if get_origin(form) is Annotated:
        return _kinds(get_args(form)[0])
    return {form} if not get_args(form) else set().union(*map(_kinds, get_args(form)))
