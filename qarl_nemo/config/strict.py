"""What every config block is: unknown keys and values outside their bounds are errors, nothing is rewritten."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A config block: unknown keys are errors, values are never rewritten, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def keys_without_meaning(cls, said: Mapping[str, Any]) -> set[str]:  # noqa: ARG003 blocks that have some look at it
        """Return the keys that mean nothing beside what the command line says of this block.

        A file may hold them for what it said itself, so the command line takes them away.

        Args:
            said: keys and values of the command line.

        Returns:
            None, unless a block says otherwise.
        """
        return set()
