"""The base of every config block: unknown keys and values out of bounds are errors, and nothing is rewritten."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A config block: unknown keys are errors, values are never rewritten, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def keys_without_meaning(cls, said: Mapping[str, Any]) -> set[str]:  # noqa: ARG003 blocks that have some look at it
        """Return the keys that mean nothing once the command line has set others of this block.

        They made sense with what the file says, so they are dropped instead of refused.

        Args:
            said: the command line's keys and values.

        Returns:
            The keys; none unless a block overrides this.
        """
        return set()
