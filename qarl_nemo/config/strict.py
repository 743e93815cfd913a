"""The base of every config block: unknown keys and values out of bounds are errors, and nothing is rewritten."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A config block: unknown keys are errors, values are never rewritten, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
