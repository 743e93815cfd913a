"""Settings of every objective: one strict model each, told apart by `objective`.

An unknown key, a value outside its bounds or a key of another objective is an error; nothing is rewritten.
Ratios are r = exp(curr - prev) and mismatch weights w = exp(prev - generation), per token or as geometric means
over a response, as each objective says. This module imports no torch, so a config is checked before torch loads.

A model also says what has to be known of its objective elsewhere: both engines and the report ask it.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

ClipLow = Annotated[float, Field(gt=0, lt=1, description="Distance of the lower clip line below 1.")]
ClipHigh = Annotated[float, Field(gt=0, le=10, description="Distance of the upper clip line above 1.")]
MismatchCap = Annotated[float, Field(gt=1, le=1000, description="Largest mismatch weight that is used as it is.")]
Temperature = Annotated[float, Field(gt=0, le=1000, description="Steepness of the soft gate; larger decays faster.")]

Unit = Literal["response", "token"]
Interval = tuple[float, float]
EVERYTHING: Interval = (0.0, math.inf)


@dataclass(frozen=True, slots=True)
class Bands:
    """Where an objective clips and caps.

    Attributes:
        positive: interval of the prox ratio in which a unit with A > 0 has a gradient.
        negative: the same for A < 0.
        mismatch: interval in which the mismatch weight is used as it is; None: the objective has no mismatch weight.
    """

    positive: Interval = EVERYTHING
    negative: Interval = EVERYTHING
    mismatch: Interval | None = None


class _Objective(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # Units of the loss's mean, and those of ratios and bands; without a default, so that neither is guessed.
    averages: ClassVar[Unit]
    band_unit: ClassVar[Unit]

    @property
    def bands(self) -> Bands:
        """Where it clips and caps; nowhere, if an objective says nothing else."""
        return Bands()

    @property
    def corrects_mismatch(self) -> bool:
        """Whether a mismatch weight makes up for a sampler whose distribution is not the learner's."""
        return self.bands.mismatch is not None


class TBPOConfig(_Objective):
    """Trust-band policy optimization; defaults are the paper's (arXiv 2604.07853, appendix B)."""

    objective: Literal["tbpo"] = "tbpo"
    averages = "response"
    band_unit = "response"
    positive_clip_high: ClipHigh = Field(
        default=0.0004, description="eps_h: a response with A > 0 is dropped when r > 1 + eps_h."
    )
    negative_clip_low: ClipLow = Field(
        default=0.0003, description="delta_l: a response with A < 0 is dropped when r < 1 - delta_l."
    )
    negative_clip_high: ClipHigh = Field(
        default=0.0007, description="delta_h: a response with A < 0 is dropped when r > 1 + delta_h."
    )
    mismatch_cap: MismatchCap = Field(
        default=2.0, description="c: the response's mismatch weight is held in [1/c, c] (Eq. 5)."
    )

    @property
    def bands(self) -> Bands:
        """Lines on both sides for A < 0, and a cap on both sides."""
        negative = (1.0 - self.negative_clip_low, 1.0 + self.negative_clip_high)
        return Bands((0.0, 1.0 + self.positive_clip_high), negative, (1.0 / self.mismatch_cap, self.mismatch_cap))


class GRPOTISConfig(_Objective):
    """Token-level PPO clip with clip-higher, times a truncated importance weight per token."""

    objective: Literal["grpo_tis"] = "grpo_tis"
    averages = "token"
    band_unit = "token"
    clip_low: ClipLow = Field(default=0.2, description="eps_low: a token with A < 0 has no gradient below 1 - eps_low.")
    clip_high: ClipHigh = Field(
        default=0.28, description="eps_high: a token with A > 0 has no gradient above 1 + eps_high (0.28 as in DAPO)."
    )
    mismatch_cap: float | None = Field(
        default=2.0,
        gt=1,
        le=1000,
        description="C: token mismatch weights are min(w, C); null: no weights, as if w were 1.",
    )

    @property
    def bands(self) -> Bands:
        """PPO's lines per token, and a cap above, if there is one."""
        mismatch = None if self.mismatch_cap is None else (0.0, self.mismatch_cap)
        return Bands((0.0, 1.0 + self.clip_high), (1.0 - self.clip_low, math.inf), mismatch)


class GSPOConfig(_Objective):
    """Sequence-level PPO clip on the geometric-mean ratio; defaults of arXiv 2507.18071."""

    objective: Literal["gspo"] = "gspo"
    averages = "response"
    band_unit = "response"
    clip_low: ClipLow = Field(default=0.0003, description="A response with A < 0 is dropped when r < 1 - clip_low.")
    clip_high: ClipHigh = Field(default=0.0004, description="A response with A > 0 is dropped when r > 1 + clip_high.")

    @property
    def bands(self) -> Bands:
        """PPO's lines per response, and no mismatch weight."""
        return Bands((0.0, 1.0 + self.clip_high), (1.0 - self.clip_low, math.inf))


class MISGSPOConfig(_Objective):
    """GSPO that rejects every response whose mismatch weight leaves a band."""

    objective: Literal["mis_gspo"] = "mis_gspo"
    averages = "response"
    band_unit = "response"
    clip_low: ClipLow = Field(default=0.0003, description="A response with A < 0 is dropped when r < 1 - clip_low.")
    clip_high: ClipHigh = Field(default=0.0004, description="A response with A > 0 is dropped when r > 1 + clip_high.")
    mismatch_low: float = Field(
        default=0.999,
        gt=0,
        lt=1,
        description="A response is rejected when its geometric-mean mismatch weight is below.",
    )
    mismatch_high: float = Field(
        default=1.002, gt=1, le=1000, description="A response is rejected when its mismatch weight is above."
    )

    @property
    def bands(self) -> Bands:
        """PPO's lines per response, and the band outside which it is rejected."""
        mismatch = (self.mismatch_low, self.mismatch_high)
        return Bands((0.0, 1.0 + self.clip_high), (1.0 - self.clip_low, math.inf), mismatch)


class PositiveGRPOConfig(_Objective):
    """GRPO that learns from responses better than their group only."""

    objective: Literal["positive_grpo"] = "positive_grpo"
    averages = "token"
    band_unit = "token"
    clip_high: ClipHigh = Field(default=0.28, description="A token with A > 0 has no gradient above 1 + clip_high.")
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")

    @property
    def bands(self) -> Bands:
        """An upper line for A > 0, and a cap above."""
        return Bands(positive=(0.0, 1.0 + self.clip_high), mismatch=(0.0, self.mismatch_cap))


class OnPolicyGRPOConfig(_Objective):
    """GRPO without a ratio: correct for exactly one optimizer step per rollout batch."""

    objective: Literal["on_policy_grpo"] = "on_policy_grpo"
    averages = "token"
    band_unit = "token"
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")

    @property
    def bands(self) -> Bands:
        """A cap above; the ratio is always 1."""
        return Bands(mismatch=(0.0, self.mismatch_cap))


class DualClipGRPOConfig(_Objective):
    """Token-level PPO clip with a second upper line for negative advantages (arXiv 1912.09729)."""

    objective: Literal["dual_clip_grpo"] = "dual_clip_grpo"
    averages = "token"
    band_unit = "token"
    clip_low: ClipLow = Field(default=0.2, description="A token with A < 0 has no gradient below 1 - clip_low.")
    clip_high: ClipHigh = Field(default=0.28, description="A token with A > 0 has no gradient above 1 + clip_high.")
    dual_clip: float = Field(
        default=3.0, gt=1, le=1000, description="c: a token with A < 0 has no gradient when r > c."
    )
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")

    @property
    def bands(self) -> Bands:
        """PPO's lines per token with an upper one for A < 0, and a cap above."""
        negative = (1.0 - self.clip_low, self.dual_clip)
        return Bands((0.0, 1.0 + self.clip_high), negative, (0.0, self.mismatch_cap))


class SAPOConfig(_Objective):
    """Soft gate per token in place of clipping; defaults of arXiv 2511.20347."""

    objective: Literal["sapo"] = "sapo"
    averages = "response"
    band_unit = "token"
    tau_pos: Temperature = Field(default=1.0, description="Temperature of the gate for A > 0.")
    tau_neg: Temperature = Field(default=1.05, description="Temperature of the gate for A <= 0; larger than tau_pos.")


class QuRLACRConfig(_Objective):
    """QuRL's adaptive clipping range (arXiv 2602.13953, Eq. 9)."""

    objective: Literal["qurl_acr"] = "qurl_acr"
    averages = "token"
    band_unit = "token"
    clip_low: ClipLow = Field(default=0.2, description="A token with A < 0 has no gradient below 1 - clip_low.")
    clip_high: ClipHigh = Field(
        default=0.2, description="A token with A > 0 has no gradient above (1 + clip_high) * max(1, w / C)."
    )
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")

    @property
    def bands(self) -> Bands:
        """PPO's lines for tokens whose weight is not truncated, and a cap above."""
        negative = (1.0 - self.clip_low, math.inf)
        return Bands((0.0, 1.0 + self.clip_high), negative, (0.0, self.mismatch_cap))


LossConfig = Annotated[
    TBPOConfig
    | GRPOTISConfig
    | GSPOConfig
    | MISGSPOConfig
    | PositiveGRPOConfig
    | OnPolicyGRPOConfig
    | DualClipGRPOConfig
    | SAPOConfig
    | QuRLACRConfig,
    Field(discriminator="objective"),
]
