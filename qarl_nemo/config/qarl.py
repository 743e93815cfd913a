"""The `qarl:` block: what is quantized, how, and whether the learner executes it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from qarl_formats import (
    BASELINE,
    DEFAULT_FORMAT,
    FORMAT_NAMES,
    OTHER_NAMES,
    QuantFormat,
    ScaleConvention,
    find_format,
    get_format,
    meant_formats,
    why_impossible,
)
from qarl_nemo.config.strict import StrictModel
from qarl_nemo.names import Backward, check_targets, split_targets

Alignment = Literal["aligned", "rollout_only", "none"]


def _split(value: object) -> object:
    return split_targets(value) if isinstance(value, str) else value


# A list, or `experts,attention`, as the command line's options take it.
Targets = Annotated[
    tuple[Literal["experts", "attention", "mlp"], ...],
    Field(min_length=1, max_length=3),
    BeforeValidator(_split),
    AfterValidator(check_targets),
]


class Stage(StrictModel):
    """A part of a run whose integer codes lie on another grid."""

    from_step: int = Field(..., ge=2, le=10_000_000)
    """The first step that is sampled and trained on this grid."""
    bits: int = Field(..., ge=2, le=8)
    """Bits of the grid; codes are stored in those of `format`, so that the engine goes on as it is."""
    reset_moments: bool = False
    """Forget the optimizer's moments, which were gathered on the grid before."""


class QarlConfig(StrictModel):
    """What is quantized, how, and whether the learner executes it."""

    alignment: Alignment = "aligned"
    """`aligned`: the learner executes what it publishes (QaRL); `rollout_only`: quantized rollouts, BF16 learner;
    `none`: BF16 on both sides."""
    format: str = DEFAULT_FORMAT
    """w4a16 | w4a8 | fp8_block | fp8_channel | int8 | nvfp4 | w8a16 | bf16; w3a16 | w2a16 use fewer levels in w4a16's
    storage; w5a16 .. w7a16 are for the built-in sampler, because vLLM takes no refits of them."""
    group_size: int | None = Field(None, ge=1, le=1 << 16)
    """Elements per scale along K: 128, 64, 32; integer formats only, null = the format's default."""
    scale_convention: ScaleConvention | None = None
    """Integer grid at 4 bits: amax/7 on [-7, 7] (`narrow_range`), amax/7.5 on [-8, 7] (`full_range`, the default), or
    amax/8 on [-8, 7] (`clipped_range`)."""
    nested_in: Literal["w8a16"] | None = None
    """Publish the codes of this finer format, which learner and engines round to those of `format`; integer formats
    only."""
    schedule: tuple[Stage, ...] | None = Field(None, max_length=64)
    """Progressive bits: the grids that follow the format's own in the course of a run."""
    targets: Targets = ("experts",)
    """Which linears are quantized, as a list or with commas; router, norms, embeddings and lm_head never are."""
    backward: Backward = "dequantized"
    """Weight of the input gradient: the one that ran, or the master."""
    keep_operand: bool = True
    """Keep what the learner's GEMMs multiply until the weights change; false unpacks it at each use, so that only the
    packed tensors stay in memory."""
    router_replay: bool = True
    """The learner uses the experts the rollout engine chose."""

    @field_validator("format")
    @classmethod
    def format_is_known(cls, name: str) -> str:
        """Refuse an unknown name and suggest the nearest legal one."""
        if find_format(name) is None:
            legal = f"{meant_formats(name)}legal here: {', '.join(FORMAT_NAMES)}; {OTHER_NAMES}"
            raise ValueError(f"unknown format {name[:80]!r}{why_impossible(name)}: {legal}")
        return name

    @model_validator(mode="after")
    def none_means_bf16(self) -> "QarlConfig":
        """Tie `alignment: none` to `format: bf16`."""
        if (self.alignment == "none") != (self.format == BASELINE):
            raise ValueError(
                f"alignment={self.alignment!r} with format={self.format!r}: `none` means BF16 on both sides, so "
                "alignment=none and format=bf16 go together"
            )
        return self

    @model_validator(mode="after")
    def stages_fit_the_format(self) -> "QarlConfig":
        """Require stages in the order of their steps, each on another grid that the format's storage holds."""
        fmt = find_format(self.format)
        if not self.schedule or fmt is None:
            return self
        if not fmt.group_sizes:
            raise ValueError(
                f"schedule: {self.format} has one grid only; take format=w8a16 for 8 -> 4 -> 2 bits, or format=w4a16 "
                "for 4 -> 3 -> 2"
            )
        problems, bits, step = [], fmt.grid_bits, 1
        for stage in self.schedule:
            if stage.bits > fmt.num_bits:
                problems.append(f"{stage.bits} bits are not stored in the {fmt.num_bits} of {self.format}; w8a16 has 8")
            if stage.bits == bits:
                problems.append(f"step {stage.from_step} goes on with {stage.bits} bits")
            if stage.from_step <= step:
                problems.append(
                    f"from_step={stage.from_step} is not after {step}; stages ascend and begin after step 1"
                )
            bits, step = stage.bits, stage.from_step
        if problems:
            raise ValueError(f"schedule: {'; '.join(problems)}")
        return self

    def stage(self, step: int) -> Stage | None:
        """Return the stage of `schedule` that a step belongs to; None before the first."""
        begun = [stage for stage in self.schedule or () if stage.from_step <= step]
        return begun[-1] if begun else None

    def served_at(self, step: int) -> QuantFormat:
        """What the rollout engine serves in a step: `served_format`, on the grid of the step's stage."""
        fmt, stage = self.served_format, self.stage(step)
        return replace(fmt, grid_bits=stage.bits) if stage else fmt

    def executed_at(self, step: int) -> QuantFormat:
        """What the learner's forward executes in a step."""
        return self.served_at(step) if self.alignment == "aligned" else self.executed_format

    @property
    def served_format(self) -> QuantFormat:
        """What the rollout engine serves, on the format's own grid.

        Raises:
            ValueError: an option that the format does not take.
        """
        return get_format(
            self.format,
            group_size=self.group_size,
            scale_convention=self.scale_convention,
            nested_in=self.nested_in,
        )

    @property
    def executed_format(self) -> QuantFormat:
        """What the learner's forward executes: the engine's format where they are aligned, else BF16."""
        return self.served_format if self.alignment == "aligned" else get_format(BASELINE)

    def grids(self, last_step: int | None) -> str:
        """Say what a start says beside the format's name: the finer codes that are published, and the stages to come.

        Args:
            last_step: where the run ends, None if nobody knows; a stage that begins later is pointed out.
        """
        told = [f", nested in {self.nested_in}"] if self.nested_in else []
        for stage in self.schedule or ():
            missed = ", which this run does not reach" if last_step is not None and stage.from_step > last_step else ""
            told.append(f", {stage.bits} bits from step {stage.from_step}{missed}")
        return "".join(told)

    @classmethod
    def keys_without_meaning(cls, said: Mapping[str, Any]) -> set[str]:
        """Return the options of integer formats if another format is chosen; an unknown one is refused anyway."""
        fmt = find_format(str(said.get("format", DEFAULT_FORMAT)))
        return set() if fmt is None or fmt.group_sizes else {"group_size", "scale_convention", "nested_in", "schedule"}
