"""`policy.lora`, and what a frozen base cannot be combined with. Imports no torch."""

from typing import Any

from pydantic import Field, field_validator

from qarl_nemo.config import StrictModel, Targets

# Source: vLLM 0.25.1 config/lora.py, max_lora_rank.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LoraConfig(StrictModel):
    """Low-rank adapters on a frozen base; what is not named here is frozen."""

    rank: int = Field(16, ge=1, le=512)
    """Rank of every adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512, as vLLM serves them."""
    alpha: float | None = Field(None, gt=0, le=1e6, description="Adapters count alpha / rank times; None = rank.")
    targets: Targets = ("attention",)
    """Which linears get adapters, quantized or not, as a list or with commas; each expert gets its own."""
    norms: bool = False
    """Train each layer's two norms, too; those of queries and keys and the last one stay frozen."""
    router: bool = False
    """Train the routers, too."""

    @field_validator("rank")
    @classmethod
    def rank_is_served(cls, rank: int) -> int:
        """Refuse a rank that vLLM does not serve."""
        if rank not in RANKS:
            raise ValueError(f"rank={rank} is served by no engine; legal: {', '.join(map(str, RANKS))}")
        return rank


def frozen_problems(config: Any) -> list[str]:
    """Say which settings of a `LocalConfig` need masters of all weights, which a frozen base has not; with fixes."""
    qarl, policy = config.qarl, config.policy
    found = {
        "qarl.alignment=rollout_only needs a BF16 copy beside the served one; set qarl.alignment=aligned, or none for "
        "BF16 on both sides": qarl.alignment == "rollout_only",
        "qarl.backward=high_precision multiplies by masters; set qarl.backward=dequantized": (
            qarl.backward == "high_precision"
        ),
        "qarl.nested_in publishes other codes than are executed; set qarl.nested_in=null": bool(qarl.nested_in),
        "qarl.schedule quantizes masters anew; set qarl.schedule=null": bool(qarl.schedule),
        "Megatron's learner holds masters; set policy.megatron_cfg=null": policy.megatron_cfg is not None,
        "policy.optimizer.update_aware_scale speeds up quantized weights; set it to null": (
            policy.optimizer.update_aware_scale is not None
        ),
    }
    return [problem for problem, is_so in found.items() if is_so]


def lora_problems(config: Any) -> list[str]:
    """Say which settings of a `LocalConfig` cannot be combined with its `policy.lora`, each with its fix."""
    if config.policy.lora is None:
        return []
    problems = frozen_problems(config)
    if config.policy.warm_start.steps and config.policy.model_path is not None:
        problems.append("policy.warm_start trains a base that no checkpoint holds; set policy.warm_start.steps=0")
    if config.policy.optimizer.name != "adamw":
        problems.append("Muon's steps have the size of whole matrices; set policy.optimizer.name=adamw")
    return problems
