"""GPU memory of `qarl train` with adapters on a frozen base: learner and rollout engine on one GPU, computed."""

from collections.abc import Mapping
from dataclasses import dataclass

from qarl_nemo.memory.engine import served_bytes
from qarl_nemo.memory.learner import Learner, rank_memory
from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.memory.units import BF16, EMBEDDED_ENGINE_BYTES, FP32
from qarl_nemo.parallelism import Parallelism

ADAPTED_PARTS = ("base", "adapters", "gradients", "activations", "working", "logits", "engine", "cache")
ENGINES = ("packed", "vllm")
# A trained parameter's BF16 weight, FP32 master and two moments.
_TRAINED_BYTES = BF16 + 3 * FP32
# Its gradient of one micro-batch in BF16, and the sum of all in FP32.
_GRADIENT_BYTES = BF16 + FP32
# Of a logit while its chunk is computed: BF16, FP32, and what a softmax and its gradient leave beside them.
_CHUNK_BYTES = BF16 + 3 * FP32


@dataclass(frozen=True)
class Adapters:
    """What is trained.

    Attributes:
        rank: rank of every adapter.
        targets: `attention`, `experts`, `mlp`.
    """

    rank: int
    targets: tuple[str, ...]

    def num_parameters(self, model: ModelSize) -> int:
        """Count the adapters' parameters; each expert has its own."""
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        block = 3 * (model.hidden + model.inner)
        sizes = {
            "attention": 4 * model.hidden + 2 * (queries + keys),
            "experts": model.num_experts * block,
            "mlp": 0 if model.num_experts else block,
        }
        return model.num_layers * self.rank * sum(sizes[target] for target in self.targets)


@dataclass(frozen=True)
class AdaptedMemory:
    """Bytes of one GPU by purpose.

    Attributes:
        parts: one of each of `ADAPTED_PARTS`.
        shared: whether the engine's cache is gone while the learner works, as the built-in sampler's is.
    """

    parts: Mapping[str, float]
    shared: bool

    @property
    def update_bytes(self) -> float:
        """The most that is held while the learner works."""
        held = sum(self.parts[name] for name in ("base", "adapters", "gradients", "engine", "activations"))
        return held + max(self.parts["working"], self.parts["logits"]) + (0 if self.shared else self.parts["cache"])

    @property
    def rollout_bytes(self) -> float:
        """What is held while the engine samples."""
        return self.parts["base"] + self.parts["adapters"] + self.parts["engine"] + self.parts["cache"]

    @property
    def peak_bytes(self) -> float:
        """The most that is held in a step."""
        return max(self.update_bytes, self.rollout_bytes)


def adapted_memory(
    model: ModelSize, learner: Learner, adapters: Adapters, *, engine: str, cache_bytes: float
) -> AdaptedMemory:
    """Compute the memory of a step, with activation checkpointing and chunked logits.

    Args:
        model: its sizes.
        learner: format and targets of the base, `keep_operand`, tokens of a micro-batch, `logprob_chunk`.
        adapters: what is trained.
        engine: `packed`, which serves the learner's base, or `vllm`, which has its own.
        cache_bytes: keys and values of the responses that are sampled together.

    Returns:
        Bytes by purpose.
    """
    base = served_bytes(model, learner)
    kept = learner.record.operand_bytes if learner.record and learner.keep_operand else 0
    quantized = model.num_layers * sum(model.linears[target] for target in learner.targets)
    one = rank_memory(model, Parallelism(1), learner).parts
    count = adapters.num_parameters(model)
    rows = learner.tokens * max(model.top_k, 1)
    # The added gradient of an MLP's input, and one projection's rows side by side with their gradient.
    added = BF16 * rows * (model.hidden + 2 * model.inner) if set(adapters.targets) - {"attention"} else 0
    served = BF16 * count
    parts = {
        "base": base + kept * quantized,
        "adapters": _TRAINED_BYTES * count,
        "gradients": _GRADIENT_BYTES * count,
        "activations": one["activations"],
        "working": one["working"] + added,
        "logits": _CHUNK_BYTES * min(learner.logprob_chunk or learner.tokens, learner.tokens) * model.vocab_size,
        "engine": served if engine == "packed" else served + base + EMBEDDED_ENGINE_BYTES,
        "cache": cache_bytes,
    }
    return AdaptedMemory(parts, shared=engine == "packed")
