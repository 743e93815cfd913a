"""The `qarl:` block of a NeMo-RL config. Does not import NeMo-RL."""

from typing import Literal

from pydantic import Field

from qarl_nemo.config import QarlConfig
from qarl_nemo.losses.config import LossConfig, TBPOConfig
from qarl_nemo.update_aware import UpdateAwareScale


class NemoQarlConfig(QarlConfig):
    """The `qarl:` block beside NeMo-RL's own."""

    objective: LossConfig = Field(default_factory=TBPOConfig)
    """Which objective replaces NeMo-RL's clipped loss, with its settings; `loss_fn` keeps the reference KL."""
    router_replay: bool | None = None  # type: ignore[assignment]
    """The learner uses the experts the rollout engine chose; None follows `policy.router_replay.enabled`."""
    layerwise_refit: bool | None = None
    """Whether colocated engines read a refit layer by layer, twice, instead of all at once; None: if all at once would
    take more than half of a GPU's free memory."""
    resident: Literal[True, False, "auto"] = "auto"
    """Whether the optimizer's state stays on the GPU while engines generate; auto: if both fit by computation.
    Parameters stay beside it where the memory that is free then suffices. A rank with too little room when its engine
    is about to wake moves its state to the host from then on."""
    gpu_memory_gib: float | None = Field(None, gt=0, le=4096)
    """Memory of one GPU, with which the run's needs are compared; None: this machine's first GPU's, else 79 (80 GB)."""
    diagnostics_period: int = Field(20, ge=1, le=10_000_000)
    """Steps between two whose ratios and log-probabilities are kept for reports; the first of each start is, too."""
    max_skipped_steps: int = Field(3, ge=1, le=1_000_000)
    """How many optimizer steps in a row may be skipped, mostly for non-finite gradients, before the run stops."""
    update_aware_scale: UpdateAwareScale | None = None
    engine_rounding: bool = False
    """The learner's norms and rotary embedding round where vLLM's do; false leaves both to Megatron."""
