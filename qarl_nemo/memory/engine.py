"""GPU memory of rollout engines, and of a refit of those that share the learner's GPUs."""

from collections.abc import Iterable
from dataclasses import dataclass

from qarl_formats import BASELINE, get_format
from qarl_nemo.memory.learner import Learner, rank_memory, stored_bytes
from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.memory.units import BF16
from qarl_nemo.parallelism import Parallelism, divisors, either, shares_kv_heads


@dataclass(frozen=True)
class EngineRanks:
    """How GPUs share one rollout engine.

    Attributes:
        tp: GPUs that share its layers.
        ep: GPUs that share its experts, with other engines if they are more than `tp`; 1: as they share layers.
    """

    tp: int = 1
    ep: int = 1

    def require(self, model: ModelSize, num_gpus: int) -> None:
        """Require that the engines share some GPUs and a model evenly.

        Raises:
            ValueError: they do not; names both sizes' legal values.
        """
        legal = engine_sizes(model, num_gpus)
        problems = _uneven("engine_tp", self.tp, {"GPUs": num_gpus, "attention heads": model.num_heads}, legal)
        if not problems and self.tp not in legal:
            problems.append(
                f"engine_tp={self.tp} neither divides {model.num_kv_heads} key-value heads nor is a multiple of them, "
                f"as vLLM needs it; it may be {either(legal)}"
            )
        if self.ep != 1 and not model.num_experts:
            problems.append(f"engine_ep={self.ep}: this model has no experts; leave it out")
        elif self.ep != 1:
            shared = {"GPUs": num_gpus, "experts": model.num_experts}
            problems += _uneven("engine_ep", self.ep, shared, divisors(*shared.values()), of=self.tp)
        if problems:
            raise ValueError("; ".join(problems))


def engine_sizes(model: ModelSize, num_gpus: int) -> list[int]:
    """Return how many of some GPUs may share the layers of an engine, ascending."""
    return [tp for tp in divisors(num_gpus, model.num_heads) if shares_kv_heads(tp, model.num_kv_heads)]


def _uneven(name: str, size: int, shared: dict[str, int], legal: Iterable[int], of: int = 1) -> list[str]:
    uneven = [f"{count} {what}" for what, count in shared.items() if size < 1 or count % size]
    wrong = [f"does not divide {' and '.join(uneven)}"] if uneven else []
    wrong += [f"is no multiple of engine_tp={of}"] if of > 1 and size % of else []
    legal = [each for each in legal if each == 1 or of < 1 or each % of == 0]
    return [f"{name}={size} {' and '.join(wrong)}; it may be {either(legal)}"] if wrong else []


def served_bytes(model: ModelSize, served: Learner, *, published: bool = False) -> float:
    """Compute the weights of one rollout engine.

    Args:
        model: its sizes.
        served: the engine's format, group size and targets.
        published: count the weights as they arrive, where finer codes are published than are served.

    Returns:
        Bytes, on all of the engine's GPUs together.
    """
    quantized = model.num_layers * sum(model.linears[target] for target in served.targets)
    fmt = served.record or get_format(BASELINE)
    packed = stored_bytes(fmt if published else fmt.narrowed)
    return packed * quantized + BF16 * (model.num_parameters - quantized)


def engine_bytes(model: ModelSize, served: Learner, tp: int, ep: int = 1) -> float:
    """Compute the weights on each GPU of a rollout engine: experts / max(tp, ep) + all others / tp.

    Args:
        model: its sizes.
        served: the engine's format, group size and targets.
        tp: GPUs that share one engine's layers.
        ep: GPUs that share its experts, with other engines if they are more than `tp`.

    Returns:
        Bytes.
    """
    experts = _expert_bytes(model, served)
    return experts / max(tp, ep) + (served_bytes(model, served) - experts) / tp


def arriving_bytes(model: ModelSize, served: Learner, tp: int, ep: int = 1) -> float:
    """Compute what each GPU of an engine holds of an update that comes from other GPUs, until all of it has arrived.

    Args:
        model: its sizes.
        served: the engine's format, group size and targets.
        tp: GPUs that share one engine's layers.
        ep: GPUs that share its experts, with other engines if they are more than `tp`.

    Returns:
        Bytes: experts / max(tp, ep) + all others, of which a rank keeps the whole tensors for vLLM's loaders.
    """
    experts = _expert_bytes(model, served)
    return experts / max(tp, ep) + served_bytes(model, served) - experts


def _expert_bytes(model: ModelSize, served: Learner) -> float:
    fmt = (served.record or get_format(BASELINE)).narrowed
    stored = stored_bytes(fmt) if "experts" in served.targets else BF16
    return stored * model.num_layers * model.expert_parameters


def refit_bytes(
    model: ModelSize,
    ranks: Parallelism,
    learner: Learner,
    engine_tp: int,
    *,
    layerwise: bool,
    engine_ep: int = 1,
    served: Learner | None = None,
    optimizer_stays: bool = False,
) -> float:
    """Compute what a GPU holds during a refit of the engine beside the learner, whose gradients are gone.

    Args:
        model: its sizes.
        ranks: how GPUs share the learner.
        learner: what it executes.
        engine_tp: GPUs that share one engine.
        layerwise: one layer of the update is held at a time; else all of it.
        engine_ep: GPUs that share one engine's experts.
        served: what the engine serves, if it is not what the learner executes.
        optimizer_stays: whether the optimizer is not offloaded.

    Returns:
        Bytes of the learner's BF16 and packed weights, of its optimizer if that stays, of the engine's weights and of
        the update; the engine's KV cache is asleep.
    """
    engine = engine_bytes(model, served or learner, engine_tp, engine_ep)
    arriving = served_bytes(model, served or learner, published=True)
    held = rank_memory(model, ranks, learner).parts
    update = max(arriving / model.num_layers, BF16 * model.vocab_size * model.hidden) if layerwise else arriving
    optimizer = held["optimizer"] if optimizer_stays else 0.0
    return held["weights"] + held["packed"] + optimizer + engine + update
