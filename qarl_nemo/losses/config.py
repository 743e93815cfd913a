"""Settings of every objective: one strict model each, told apart by `objective`.

An unknown key, a value outside its bounds or a key of another objective is an error; nothing is rewritten.
Ratios are r = exp(curr - prev) and mismatch weights w = exp(prev - generation), per token or as geometric means
over a response, as each objective says. This module imports no torch, so a config is checked before torch loads.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

ClipLow = Annotated[float, Field(gt=0, lt=1, description="Distance of the lower clip line below 1.")]
ClipHigh = Annotated[float, Field(gt=0, le=10, description="Distance of the upper clip line above 1.")]
MismatchCap = Annotated[float, Field(gt=1, le=1000, description="Largest mismatch weight that is used as it is.")]
Temperature = Annotated[float, Field(gt=0, le=1000, description="Steepness of the soft gate; larger decays faster.")]


class _Objective(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TBPOConfig(_Objective):
    """Trust-band policy optimization; defaults are the paper's (arXiv 2604.07853, appendix B)."""

    objective: Literal["tbpo"] = "tbpo"
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


class GRPOTISConfig(_Objective):
    """Token-level PPO clip with clip-higher, times a truncated importance weight per token."""

    objective: Literal["grpo_tis"] = "grpo_tis"
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


class GSPOConfig(_Objective):
    """Sequence-level PPO clip on the geometric-mean ratio; defaults of arXiv 2507.18071."""

    objective: Literal["gspo"] = "gspo"
    clip_low: ClipLow = Field(default=0.0003, description="A response with A < 0 is dropped when r < 1 - clip_low.")
    clip_high: ClipHigh = Field(default=0.0004, description="A response with A > 0 is dropped when r > 1 + clip_high.")


class MISGSPOConfig(_Objective):
    """GSPO that rejects every response whose mismatch weight leaves a band."""

    objective: Literal["mis_gspo"] = "mis_gspo"
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


class PositiveGRPOConfig(_Objective):
    """GRPO that learns from responses better than their group only."""

    objective: Literal["positive_grpo"] = "positive_grpo"
    clip_high: ClipHigh = Field(default=0.28, description="A token with A > 0 has no gradient above 1 + clip_high.")
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")


class OnPolicyGRPOConfig(_Objective):
    """GRPO without a ratio: correct for exactly one optimizer step per rollout batch."""

    objective: Literal["on_policy_grpo"] = "on_policy_grpo"
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")


class DualClipGRPOConfig(_Objective):
    """Token-level PPO clip with a second upper line for negative advantages (arXiv 1912.09729)."""

    objective: Literal["dual_clip_grpo"] = "dual_clip_grpo"
    clip_low: ClipLow = Field(default=0.2, description="A token with A < 0 has no gradient below 1 - clip_low.")
    clip_high: ClipHigh = Field(default=0.28, description="A token with A > 0 has no gradient above 1 + clip_high.")
    dual_clip: float = Field(
        default=3.0, gt=1, le=1000, description="c: a token with A < 0 has no gradient when r > c."
    )
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")


class SAPOConfig(_Objective):
    """Soft gate per token in place of clipping; defaults of arXiv 2511.20347."""

    objective: Literal["sapo"] = "sapo"
    tau_pos: Temperature = Field(default=1.0, description="Temperature of the gate for A > 0.")
    tau_neg: Temperature = Field(default=1.05, description="Temperature of the gate for A <= 0; larger than tau_pos.")


class QuRLACRConfig(_Objective):
    """QuRL's adaptive clipping range (arXiv 2602.13953, Eq. 9)."""

    objective: Literal["qurl_acr"] = "qurl_acr"
    clip_low: ClipLow = Field(default=0.2, description="A token with A < 0 has no gradient below 1 - clip_low.")
    clip_high: ClipHigh = Field(
        default=0.2, description="A token with A > 0 has no gradient above (1 + clip_high) * max(1, w / C)."
    )
    mismatch_cap: MismatchCap = Field(default=2.0, description="C: token mismatch weights are min(w, C).")


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
