"""Looks up and replaces values of a nested config by dotted key."""

from collections.abc import Mapping
from typing import Any

ABSENT = object()
"""What `look_up` returns for an absent key."""


def look_up(config: Mapping[str, Any], dotted: str, default: Any = ABSENT) -> Any:
    """Return the value of a dotted key, or `default` if it is absent.

    Args:
        config: nested mappings.
        dotted: the key, such as `policy.generation.backend`.
        default: what to return for an absent key.
    """
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def with_value(config: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """Return a config with another value of a dotted key; the config itself stays as it is.

    Args:
        config: nested mappings.
        dotted: the key, such as `policy.generation.backend`.
        value: what it shall have.
    """
    key, _, rest = dotted.partition(".")
    return dict(config) | {key: with_value(config.get(key) or {}, rest, value) if rest else value}


def is_number(value: Any) -> bool:
    """Tell whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
