"""`rollout.noise`: how strong the noise on the rollout engine's norms is, step by step. Imports no torch."""

from typing import Literal

from pydantic import Field, model_validator

from qarl_nemo.config import StrictModel


class NoiseConfig(StrictModel):
    """Adaptive quantization noise: exploration by noise on norms that anneals stage by stage."""

    start: float = Field(1e-2, gt=0, le=1, description="Standard deviation of the first noisy stage.")
    end: float = Field(1e-4, gt=0, le=1, description="Standard deviation of the last stage.")
    stages: int = Field(10, ge=3, le=1000, description="Equal parts of the run; the first has no noise.")
    mode: Literal["clean", "replayed"] = "replayed"
    """`replayed`: the learner's forward has the noise that sampled the batch; `clean`: it has none, as in QeRL."""
    relative: bool = False
    """Standard deviations in units of each channel's |w|, in place of absolute ones."""

    @model_validator(mode="after")
    def noise_anneals(self) -> "NoiseConfig":
        """Reject a schedule that grows."""
        if self.end > self.start:
            raise ValueError(f"end={self.end:g} is above start={self.start:g}: noise anneals; set end <= start")
        return self

    def stage(self, step: int, num_steps: int) -> int:
        """Return the stage that a step's rollouts belong to.

        Args:
            step: training step, from 1.
            num_steps: steps of the whole run.

        Returns:
            From 0, which has no noise, to stages - 1.

        Source: NVlabs/QeRL trl_trainer/noise_scheduler.py, `get_sigma_by_step`, which counts the updates before the
            rollouts; its division of floats included.
        """
        return min(int((step - 1) // (num_steps / self.stages)), self.stages - 1)

    def sigma(self, stage: int) -> float:
        """Return a stage's standard deviation, start * (end / start) ** ((stage - 1) / (stages - 2)); 0 for stage 0.

        Args:
            stage: from `stage`.

        Source: NVlabs/QeRL trl_trainer/grpo_trainer.py, `sigma_decay_schedule_np`. The paper's equation 8 has other
            exponents, which do not end at `end` in the code's stages.
        """
        if stage == 0:
            return 0.0
        return self.start * (self.end / self.start) ** ((stage - 1) / (self.stages - 2))
