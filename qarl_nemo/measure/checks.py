"""Checks that the settings of several measurements share, each a list of what is wrong."""

from collections.abc import Iterable

# No measurement has more of anything; a slip of the keyboard would fill the memory.
_MOST = 2**24


def count_problems(counts: Iterable[tuple[str, int | None]]) -> list[str]:
    """Return a sentence for each count below 1, or above what any measurement has; None stands for a default."""
    given = [(name, value) for name, value in counts if value is not None]
    small = [f"{name}={value} must be at least 1" for name, value in given if value < 1]
    return small + [f"{name}={value} must be at most {_MOST}" for name, value in given if value > _MOST]


def share_problems(settings: object, *names: str) -> list[str]:
    """Return a sentence for each of these settings that is no share above 0; None stands for a default."""
    shares = [(name, getattr(settings, name)) for name in names]
    return [f"{name}={value} must lie in (0, 1]" for name, value in shares if value is not None and not 0 < value <= 1]
