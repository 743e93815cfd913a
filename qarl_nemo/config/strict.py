"""The base of every config block: unknown keys and values out of bounds are errors, and nothing is rewritten."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class StrictModel(BaseModel):
    """A config block: unknown keys are errors, values are never rewritten, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def numbers_are_no_booleans(cls, values: Any) -> Any:
        """Refuse true and false, and what YAML reads as these, where a number is meant: they would count as 1 and 0."""
        if not isinstance(values, dict):
            return values
        wrong = [key for key, value in values.items() if isinstance(value, bool) and cls._is_number(key)]
        if wrong:
            raise ValueError("; ".join(f"{key}={str(values[key]).lower()} is no number" for key in wrong))
        return values

    @classmethod
    def _is_number(cls, key: str) -> bool:
        field = cls.model_fields.get(key)
        forms = (field.annotation, *get_args(field.annotation)) if field else ()
        # A form may have bounds of its own: `Annotated[float, Field(ge=1)] | None`.
        kinds = {getattr(form, "__origin__", form) for form in forms}
        return bool(kinds & {int, float}) and bool not in kinds

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
