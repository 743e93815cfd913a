"""Values of a nested config by their dotted key."""

from collections.abc import Mapping
from typing import Any

ABSENT = object()
"""What `look_up` returns for a key that is not there."""


def look_up(config: Mapping[str, Any], dotted: str, default: Any = ABSENT) -> Any:
    """Return the value of a dotted key, `default` where it is absent.

    Args:
        config: nested mappings.
        dotted: such as `policy.generation.backend`.
        default: of an absent key.

    Returns:
        The value.
    """
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value
