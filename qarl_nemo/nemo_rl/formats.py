"""What the `qarl:` block, as it reaches a worker, says about the engine's format and the learner's."""

from collections.abc import Mapping
from typing import Any

from qarl_kernels import QuantFormat, get_format


def served_format(qarl: Mapping[str, Any]) -> QuantFormat:
    """Return what the rollout engine serves.

    Args:
        qarl: the block, as a plain mapping.

    Returns:
        The format.

    Raises:
        ValueError: unknown format, or an option that it does not take.
    """
    return get_format(qarl["format"], group_size=qarl.get("group_size"), scale_convention=qarl.get("scale_convention"))


def executed_format(qarl: Mapping[str, Any]) -> QuantFormat:
    """Return what the learner's forward executes: the engine's format where it is aligned, else bf16.

    Args:
        qarl: the block, as a plain mapping.

    Returns:
        The format.
    """
    return served_format(qarl) if qarl["alignment"] == "aligned" else get_format("bf16")
