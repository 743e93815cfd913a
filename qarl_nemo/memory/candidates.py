"""What could be run on some GPUs, held against their memory, the best first."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from qarl_nemo.memory.engine import EngineRanks, refit_bytes
from qarl_nemo.memory.learner import OPTIMIZERS, Learner, Memory, largest_budget, rank_memory
from qarl_nemo.memory.lora import ENGINES, AdaptedMemory, Adapters, adapted_memory
from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.parallelism import Parallelism

ORDER = (
    "state on the GPU, no recomputation, fewer ranks that share a tensor (tp x pp x cp), adam before adam_bf16 before "
    "muon, fewer ranks that share experts (ep x etp), more tokens a micro-batch"
)
"""What makes one candidate come before another, in the order of weight: a rule, not a measurement."""


@dataclass(frozen=True)
class Candidate:
    """A learner in one layout.

    Attributes:
        ranks: how GPUs share it.
        learner: what it holds and computes.
        memory: what its fullest rank holds.
        room: bytes that its tensors may take.
        tokens: the largest micro-batch that fits; None: none does.
        refits: a GPU's peak while its engine gets all weights at once, and one layer at a time; empty without one.
    """

    ranks: Parallelism
    learner: Learner
    memory: Memory
    room: float
    tokens: int | None
    refits: tuple[float, ...] = ()

    @property
    def missing_bytes(self) -> float:
        """What a GPU lacks for the step and the smaller refit; 0 or less where they fit."""
        return max(self.memory.peak_bytes, *self.refits[-1:], 0.0) - self.room

    @property
    def fits(self) -> bool:
        """Whether a GPU holds the step and a refit."""
        return self.missing_bytes <= 0


def candidates(
    model: ModelSize,
    layouts: Iterable[Parallelism],
    learners: Iterable[Learner],
    room: float,
    engine: EngineRanks | None = None,
) -> list[Candidate]:
    """Compute every learner in every layout.

    Args:
        model: the model's sizes.
        layouts: how GPUs may share it.
        learners: what they may hold and compute.
        room: bytes that tensors may take on a GPU.
        engine: how GPUs share one rollout engine on the learner's GPUs.

    Returns:
        Those that fit, by `ORDER`; then the others, the nearest first.
    """
    found = [_candidate(model, ranks, learner, room, engine) for ranks, learner in product(layouts, learners)]
    return sorted(found, key=lambda one: (0.0, *_order(one)) if one.fits else (one.missing_bytes, *_order(one)))


def _candidate(
    model: ModelSize, ranks: Parallelism, learner: Learner, room: float, engine: EngineRanks | None
) -> Candidate:
    refits = []
    if engine is not None:
        refit = partial(refit_bytes, model, ranks, learner, engine.tp, engine_ep=engine.ep)
        refits = [refit(layerwise=False), refit(layerwise=True)]
    needed = rank_memory(model, ranks, learner)
    held = max(refits[-1:], default=0.0)

    def peak_bytes(tokens: int) -> float:
        return max(held, rank_memory(model, ranks, replace(learner, tokens=tokens)).peak_bytes)

    return Candidate(ranks, learner, needed, room, _most(peak_bytes, room, learner.tokens), tuple(refits))


def _most(peak_bytes: Callable[[int], float], room: float, asked: int) -> int | None:
    """Return the largest micro-batch that fits, also where the one that was asked about is no multiple of 1024."""
    most = largest_budget(peak_bytes, room)
    return max(most or 0, asked) if peak_bytes(asked) <= room else most


def _order(one: Candidate) -> tuple[float, ...]:
    ranks, learner = one.ranks, one.learner
    return (
        learner.optimizer == "offloaded",
        learner.recompute == "full",
        ranks.tp * ranks.pp * ranks.cp,
        list(OPTIMIZERS).index(learner.optimizer),
        ranks.ep * ranks.etp,
        -(one.tokens or 0),
    )


@dataclass(frozen=True)
class AdaptedCandidate:
    """Adapters on a frozen base, learner and one rollout engine on one GPU.

    Attributes:
        engine: one of `ENGINES`.
        memory: what the GPU holds.
        room: bytes that tensors may take.
        update_tokens: the largest micro-batch whose update fits; None: none does, or the engine does not serve the
            base.
        served: whether the engine serves the base beside adapters.
        kept_bytes: what `keep_operand` adds to the peak.
    """

    engine: str
    memory: AdaptedMemory
    room: float
    update_tokens: int | None
    served: bool
    kept_bytes: float

    @property
    def tokens(self) -> int | None:
        """The largest micro-batch that fits; None: none does, or rollouts do not fit, which have no micro-batches."""
        return self.update_tokens if self.memory.rollout_bytes <= self.room else None

    @property
    def missing_bytes(self) -> float:
        """What the GPU lacks; 0 or less where everything fits."""
        return self.memory.peak_bytes - self.room

    @property
    def fits(self) -> bool:
        """Whether the engine serves the base, and the GPU holds everything."""
        return self.served and self.missing_bytes <= 0


def adapted_candidates(
    model: ModelSize, learner: Learner, adapters: Adapters, room: float, cache_bytes: float, *, vllm_serves: bool
) -> list[AdaptedCandidate]:
    """Compute one GPU with each rollout engine.

    Args:
        model: the model's sizes.
        learner: format and targets of the base, and the tokens of a micro-batch.
        adapters: what is trained.
        room: bytes that tensors may take.
        cache_bytes: keys and values of the responses that are sampled together.
        vllm_serves: whether a kernel of vLLM takes the base.

    Returns:
        One of each of `ENGINES`, in that order.
    """
    beside = learner.record is None or learner.record.runs_beside_adapters(learner.targets)
    found = []
    for engine in ENGINES:
        memory = partial(adapted_memory, model, adapters=adapters, engine=engine, cache_bytes=cache_bytes)
        served = engine != "vllm" or (vllm_serves and beside)
        most = _most(partial(_update_bytes, memory, learner), room, learner.tokens) if served else None
        kept_bytes = memory(learner).peak_bytes - memory(replace(learner, keep_operand=False)).peak_bytes
        found.append(AdaptedCandidate(engine, memory(learner), room, most, served, kept_bytes))
    return found


def _update_bytes(memory: Callable[[Learner], AdaptedMemory], learner: Learner, tokens: int) -> float:
    return memory(replace(learner, tokens=tokens)).update_bytes
