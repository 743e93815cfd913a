"""The `qarl:` block of a NeMo-RL config: what it may say, and where its workers find it. Imports no NeMo-RL."""

from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from qarl_nemo.config import ConfigError, QarlConfig, validate
from qarl_nemo.losses.config import LossConfig, TBPOConfig
from qarl_nemo.nemo_rl.conflicts import find_conflicts
from qarl_nemo.nemo_rl.plugin import SENTINEL
from qarl_nemo.nemo_rl.residency import optimizer_stays


class NemoQarlConfig(QarlConfig):
    """The `qarl:` block beside NeMo-RL's own."""

    objective: LossConfig = Field(default_factory=TBPOConfig)
    """Which objective replaces NeMo-RL's clipped loss, with its settings; `loss_fn` keeps the reference KL."""
    router_replay: bool | None = None  # type: ignore[assignment]
    """The learner uses the experts the rollout engine chose; None follows `policy.router_replay.enabled`."""
    layerwise_refit: bool | None = None
    """Whether colocated engines read one layer of a refit at a time, twice, instead of all of it at once; None: where
    all of it would take more than half of a GPU's free memory."""
    resident: bool | Literal["auto"] = "auto"
    """Whether the optimizer's state stays on the GPU while engines generate; auto: where both fit by computation. A
    rank that finds too little room when its engine is to wake moves its state to the host from then on."""
    gpu_memory_gib: float | None = Field(None, gt=0, le=4096)
    """Memory of one GPU, which the run's needs are held against; None: of this machine's first GPU, else 79 (80 GB)."""
    max_skipped_steps: int = Field(3, ge=1, le=1_000_000)
    """How many optimizer steps in a row may be skipped for a non-finite loss or gradient before the run stops."""
    engine_rounding: bool = False
    """The learner's norms and rotary embedding round where vLLM's do; false leaves both to Megatron."""


def apply_qarl(master_config: Any) -> NemoQarlConfig:
    """Check a NeMo-RL config together with its `qarl:` block, and put the block where NeMo-RL's workers see it.

    `policy.qarl` and `policy.generation.qarl` become plain dictionaries, `policy.generation.quant_cfg` the sentinel
    that selects our vLLM worker, and `policy.offload_optimizer_for_refit` what `resident` comes to. Shapes are checked
    where the model's config.json is at hand: `policy.model_name` is a folder, or lies in Hugging Face's cache; workers
    check them in any case.

    Args:
        master_config: NeMo-RL's `MasterConfig`, or the nested dictionary of one; changed in place.

    Returns:
        The checked block, `router_replay` and `resident` resolved.

    Raises:
        ConfigError: no `qarl:` block, an illegal key or value in it, or conflicts with NeMo-RL's keys; all are listed,
            each with key, value, legal values and the fix.
    """
    values = as_mapping(master_config)
    block = values.get("qarl")
    if not isinstance(block, Mapping):
        raise ConfigError(
            "the config has no `qarl:` block, so nothing would be quantized; add `qarl: {format: w4a16}`, or run "
            "NeMo-RL's own examples/run_grpo.py"
        )
    qarl = validate({"qarl": block}, _Whole, source="config").qarl
    problems = find_conflicts(values, qarl)
    if problems:
        raise ConfigError(f"qarl: {len(problems)} conflict(s) with NeMo-RL's settings\n  " + "\n  ".join(problems))
    policy = master_config["policy"] if isinstance(master_config, Mapping) else master_config.policy
    replay = bool((policy.get("router_replay") or {}).get("enabled", False))
    stays = optimizer_stays(values, qarl)
    qarl = qarl.model_copy(update={"router_replay": replay, "resident": stays})
    policy["offload_optimizer_for_refit"] = not stays
    policy["qarl"] = qarl.model_dump(mode="json")
    generation: MutableMapping[str, Any] = policy["generation"]
    generation["qarl"], generation["quant_cfg"] = qarl.model_dump(mode="json"), SENTINEL
    return qarl


def as_mapping(master_config: Any) -> Mapping[str, Any]:
    """Return a NeMo-RL config as nested dictionaries."""
    return master_config.model_dump() if isinstance(master_config, BaseModel) else master_config


class _Whole(BaseModel):
    qarl: NemoQarlConfig
