"""Looks up values of a nested config by dotted key."""

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
