"""The `checkpointing:` block of the embedded engine's config. Imports no torch."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from qarl_nemo.config import StrictModel
from qarl_nemo.train.time_limit import limit_seconds


class CheckpointingConfig(StrictModel):
    """Atomic checkpoints; a killed run resumes to the same numbers."""

    enabled: bool = True
    save_period: int = Field(50, ge=1, le=10_000_000)
    keep_last: int = Field(2, ge=1, le=1000)
    checkpoint_must_save_by: str | None = None
    """DD:HH:MM:SS from the run's start, as in NeMo-RL: before that time the run tests, saves and ends."""

    @field_validator("checkpoint_must_save_by", mode="before")
    @classmethod
    def is_a_time(cls, value: Any) -> Any:
        """Refuse what is no time."""
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(f"put days:hours:minutes:seconds in quotes, '01:03:45:00', in the place of {value}")
        if isinstance(value, str):
            limit_seconds(value)
        return value

    @model_validator(mode="after")
    def a_limit_saves(self) -> "CheckpointingConfig":
        """Require the checkpoint that a run with a limit is to end with."""
        if self.checkpoint_must_save_by is not None and not self.enabled:
            raise ValueError(
                "checkpoint_must_save_by ends a run early, and with enabled=false it could never go on; set "
                "enabled=true, or checkpoint_must_save_by=null"
            )
        return self
