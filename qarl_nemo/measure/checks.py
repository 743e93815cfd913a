"""Checks that the settings of several measurements share; each collects what is wrong, so that one error has it all."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


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
    try:
        return function(*arguments, **options)
    except ValueError as error:
        problems.append(str(error))
        return None


def count_problems(counts: Iterable[tuple[str, int | None]]) -> list[str]:
    """Return a sentence for each count below 1; None stands for a default."""
    return [f"{name}={value} must be at least 1" for name, value in counts if value is not None and value < 1]


def share_problems(settings: object, *names: str) -> list[str]:
    """Return a sentence for each of these settings that is no share above 0; None stands for a default."""
    shares = [(name, getattr(settings, name)) for name in names]
    return [f"{name}={value} must lie in (0, 1]" for name, value in shares if value is not None and not 0 < value <= 1]
