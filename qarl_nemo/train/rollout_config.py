"""The `rollout:` block of the embedded engine's config: the built-in sampler, or vLLM. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from qarl_nemo.config import StrictModel
from qarl_nemo.train.noise import NoiseConfig

# vLLM 0.25.1 samples at this temperature where a lower one but 0 is asked for (`SamplingParams.__post_init__`).
LOWEST_TEMPERATURE = 0.01


class RolloutSettings(StrictModel):
    """What every rollout engine takes."""

    max_new_tokens: int = Field(8, ge=1, le=1_048_576)
    temperature: float = Field(
        1.0, ge=LOWEST_TEMPERATURE, le=100, description=f"vLLM samples at {LOWEST_TEMPERATURE} where less is set."
    )
    top_p: float = Field(1.0, gt=0, le=1)
    """Truncates sampling; logprobs on both sides stay those of the untruncated distribution at `temperature`."""
    batch_size: int = Field(1024, ge=1, le=65_536, description="Responses decoded at once.")
    noise: NoiseConfig | None = Field(None, description="Exploration by noise on the engine's norms; None = none.")


class PackedRolloutConfig(RolloutSettings):
    """The built-in sampler, which holds only what refits brought."""

    engine: Literal["packed"] = "packed"
    keep_operand: bool = True
    """Keep what the GEMM multiplies beside the packed tensors; false repacks at each use: less memory, slower."""


class VllmRolloutConfig(RolloutSettings):
    """vLLM in this process, on the run's device, or on a GPU of its own; `vllm/limits.py` says what it serves there."""

    engine: Literal["vllm"]
    own_gpu: bool = False
    """Run in a process of its own on the first GPU; the learner takes the GPUs after it."""
    max_model_len: int | None = Field(
        None, ge=2, le=1_048_576, description="Tokens of prompt and response; None = the model's."
    )
    kv_cache_gib: float = Field(1.0, gt=0, le=4096, description="Memory of the KV cache, GiB, beside the weights'.")
    enforce_eager: bool = False
    """Run without CUDA graphs: starts sooner, decodes slower. No effect on a CPU."""
    async_scheduling: bool = False
    """Schedule a decoding step while the GPU computes the one before; of a small model's step with many responses,
    scheduling is the larger part."""


def engine(rollout: Any) -> Any:
    """Return the engine that a rollout block asks for; the built-in sampler by default."""
    return rollout.get("engine", "packed") if isinstance(rollout, dict) else getattr(rollout, "engine", None)


RolloutConfig = Annotated[
    Annotated[PackedRolloutConfig, Tag("packed")] | Annotated[VllmRolloutConfig, Tag("vllm")], Discriminator(engine)
]
