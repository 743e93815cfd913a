"""How a check words what is wrong with a key of NeMo-RL's config."""

from typing import Any


def problem_line(key: str, value: Any, why: str, legal: str) -> str:
    """Return `key=value: why; set legal`.

    Args:
        key: dotted.
        value: as the config has it.
        why: it cannot be.
        legal: what to set.
    """
    return f"{key}={yaml_text(value)}: {why}; set {legal}"


def yaml_text(value: Any) -> str:
    """Return a value as YAML has it: `null`, `true` or `false`, anything else as its text."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
