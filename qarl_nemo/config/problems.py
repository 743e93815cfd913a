"""Validation whose errors name the key as a user wrote it, what is legal and what was probably meant."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from qarl_nemo.config.models import all_keys, annotations, models_in

# The keys with which a block that has one is switched off; null does not do it.
_SWITCHES = {"enabled": "enabled=false", "steps": "steps=0"}
_MAX_LINES = 40
_MAX_CHARS = 80
# What pydantic calls these kinds are Python's words.
_BLOCK_ERRORS = ("model_type", "model_attributes_type")
_WORD = re.compile(r"[\w.:/-]+")
# Errors whose value is shown. A text that only has the wrong form may hold a secret, and our own checks quote what they
# want to.
_TELLING_ERRORS = ("literal_error", "enum", "int_", "float_", "bool_", "greater_than", "less_than", "finite_number")
_LIST_ERRORS = ("tuple_type", "list_type")
_TEXT_ERRORS = ("string_type", "path_type")
# Below this similarity, a name is more often something else than a typo.
_SLIP, _SLIP_ELSEWHERE = 0.6, 0.8


class ConfigError(ValueError):
    """The config cannot be used; the message lists every problem."""


class SeveralProblemsError(ValueError):
    """Several things are wrong that have nothing to do with each other; `catch` keeps each.

    Args:
        problems: what they are.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n  ".join(problems))
        self.problems = problems


Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


def validate(values: Any, model: type[Model], *, source: str) -> Model:
    """Validate plain values against a strict model.

    Args:
        values: nested dictionaries and lists.
        model: the pydantic model.
        source: where the values come from, for the error.

    Raises:
        ConfigError: every unknown key and illegal value, one a line.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = _without_echoes(error.errors(include_url=False))
        lines = [_explain(problem, model) for problem in problems[:_MAX_LINES]]
        if len(problems) > _MAX_LINES:
            lines.append(f"... and {len(problems) - _MAX_LINES} more")
        raise ConfigError(f"{source}: {len(problems)} problem(s)\n  " + "\n  ".join(lines)) from error


def _without_echoes(problems: Sequence[Any]) -> list[Any]:
    """Leave out that a list is too short where pydantic counted only the items that it accepted."""
    refused = {other["loc"][:depth] for other in problems for depth in range(len(other["loc"]))}
    return [one for one in problems if one["type"] != "too_short" or one["loc"] not in refused]


def hint(wrong: str, legal: Sequence[str]) -> str:
    """Return what was probably meant, if anything is similar, and what is legal.

    Args:
        wrong: what the user wrote.
        legal: the legal names.

    Returns:
        `did you mean 'x'? legal here: x, y`.
    """
    return _guess(wrong, legal) + f"legal here: {', '.join(legal)}"


def _guess(wrong: str, legal: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(wrong[:_MAX_CHARS], legal, n=1, cutoff=_SLIP)
    return f"did you mean {nearest[0]!r}? " if nearest else ""


def _explain(problem: Any, model: type[BaseModel]) -> str:
    location, models = _follow([str(part) for part in problem["loc"]], model)
    dotted, kind = ".".join(location)[: 2 * _MAX_CHARS], problem["type"]
    if kind == "extra_forbidden":
        legal = sorted({key for held in models for key in held.model_fields})
        exact = any(key[-1] == location[-1] for key in all_keys([model]) if key != tuple(location))
        meant = "" if _guess(location[-1], legal) and not exact else _elsewhere(location, model)
        return f"unknown key {dotted!r}: {meant}{hint('' if meant else location[-1], legal)}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        # The discriminator is a key, or a function with the key's name.
        key = problem["ctx"]["discriminator"].strip("'()")
        if kind == "union_tag_not_found":
            legal = [word for held in models for word in get_args(held.model_fields[key].annotation)]
            return f"{dotted}.{key} is missing and says which keys {dotted} has; legal: {', '.join(legal)}"
        legal = [word.strip(" '") for word in problem["ctx"]["expected_tags"].split(",")]
        given = str(problem["ctx"]["tag"])[:_MAX_CHARS]
        return f"unknown {dotted}.{key} {given!r}: {hint(given, legal)}"
    words = (
        [] if kind == "literal_error" else [word for held in annotations(location, [model]) for word in _words(held)]
    )
    legal_words = f"; legal: {', '.join(map(str, words))}" if words else ""
    return f"{dotted or 'config'}: {_message(problem, models, model)}{legal_words}"


def _message(problem: Any, models: Sequence[type[BaseModel]], root: type[BaseModel]) -> str:
    given = str(problem["input"])[:_MAX_CHARS]
    value = _named(problem["input"])
    if problem["type"] == "dict_type":
        return f"expected a block, each line of it NAME: value, not {value}"
    if problem["type"] in _BLOCK_ERRORS:
        keys = sorted({key for held in models for key in held.model_fields})
        off = [f"; {_SWITCHES[key]} switches it off" for key in keys if key in _SWITCHES and problem["input"] is None]
        return f"expected a block with these keys, not {value}: {', '.join(keys)}{''.join(off)}"
    if problem["type"] == "missing" and (examples := _examples(problem["loc"], root)):
        return f"{problem['msg']}, for example {examples}"
    if problem["type"] in _LIST_ERRORS:
        return f"expected a list, not {value}"
    if problem["type"] in _TEXT_ERRORS:
        return _not_text(problem["input"])
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["type"].startswith(_TELLING_ERRORS) or not isinstance(problem["input"], str | int | float | None):
        return message
    shown = repr(given) if isinstance(problem["input"], str) else "null" if problem["input"] is None else given
    return f"{message} (given {shown})"


def _named(given: Any) -> str:
    """Name a value: a word as it is, a list, a block or other text, which may hold a secret, by its kind alone."""
    if isinstance(given, list | dict):
        return f"a {'list' if isinstance(given, list) else 'block'}"
    if isinstance(given, str) and not _WORD.fullmatch(given):
        return "text"
    return "null" if given is None else repr(str(given)[:_MAX_CHARS])


def _not_text(given: Any) -> str:
    if given is None or isinstance(given, list | dict):
        return f"expected text, not {_named(given)}"
    # YAML has read it, and 3.10 or yes was written otherwise.
    kind = "true or false" if isinstance(given, bool) else "a number"
    quoted = "put it in quotes, as you wrote it; in the place of a ${...}, put what it refers to there in quotes"
    return f"expected text, not {kind}; {quoted}"


def _examples(place: Sequence[Any], root: type[BaseModel]) -> str:
    _, around = _follow([str(part) for part in place[:-1]], root)
    fields = [held.model_fields[place[-1]] for held in around if place[-1] in held.model_fields]
    return " or ".join(example for field in fields for example in field.examples or ())


def _elsewhere(location: list[str], model: type[BaseModel]) -> str:
    """Look for a key in other blocks: with the same name or initials (`learning_rate`, `lr`), or misspelled."""
    wrong = location[-1]
    keys = [key for key in dict.fromkeys(all_keys([model])) if key != tuple(location)]
    initials = "".join(word[0] for word in wrong.split("_") if word) if "_" in wrong else ""
    found = [key for key in keys if key[-1] in (wrong, initials)]
    if not found:
        names = difflib.get_close_matches(wrong[:_MAX_CHARS], {key[-1] for key in keys}, n=1, cutoff=_SLIP_ELSEWHERE)
        found = [key for key in keys if key[-1] in names]
    # First those in the block that the user named.
    found.sort(key=lambda key: key[0] != location[0])
    return f"did you mean {' or '.join(repr('.'.join(key)) for key in found[:3])}? " if found else ""


def _words(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in _words(part))


def _forms(annotation: Any) -> Iterator[tuple[str, list[type[BaseModel]]]]:
    """Yield what pydantic puts into a location to tell the forms of a key apart, with each form's blocks."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, Tag):
            yield mark.tag, models_in(annotation)
    for part in get_args(annotation):
        yield from _forms(part)


def _follow(location: list[str], model: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow a pydantic error location to the keys a user wrote and the models around its last part."""
    keys: list[str] = []
    models: list[type[BaseModel]] = [model]
    forms: dict[str, list[type[BaseModel]]] = {}
    for depth, part in enumerate(location):
        if part in forms:
            # A user does not write it.
            models = forms.pop(part)
            continue
        if not part.isdecimal():
            # The members of a list have forms, too.
            fields = [held.model_fields[part].annotation for held in models if part in held.model_fields]
            forms = {name: blocks for annotation in fields for name, blocks in _forms(annotation)}
        tagged = [m for m in models if any(part in get_args(f.annotation) for f in m.model_fields.values())]
        inside = [
            m for held in models if part in held.model_fields for m in models_in(held.model_fields[part].annotation)
        ]
        if tagged and not inside and depth + 1 < len(location):
            # pydantic inserts a union member's tag (`loss_fn.tbpo.clip_low`), which is not in the user's path.
            models = tagged
            continue
        keys.append(part)
        models = inside or models
    return keys, models


def attempt(problems: list[str], function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
    """Call a function that refuses what a user asked for.

    Args:
        problems: gets the text of its error.
        function: raises ValueError.
        arguments: its arguments.
        options: its keyword arguments.

    Returns:
        What it returned; None after an error.
    """
    errors: list[ValueError] = []
    result = catch(errors, function, *arguments, **options)
    problems.extend(map(str, errors))
    return result


def catch(errors: list[ValueError], function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
    """Call a function as `attempt` does, and keep its error itself, so that it can be raised.

    Args:
        errors: gets the error, of several problems one for each.
        function: raises ValueError.
        arguments: its arguments.
        options: its keyword arguments.

    Returns:
        What it returned; None after an error.
    """
    try:
        return function(*arguments, **options)
    except SeveralProblemsError as error:
        errors += map(ValueError, error.problems)
    except ValueError as error:
        errors.append(error)
    return None
