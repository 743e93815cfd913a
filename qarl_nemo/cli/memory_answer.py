"""What `qarl memory` says before its table: what fits, or what comes nearest and what would help."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from qarl_nemo.cli.memory_units import with_unit
from qarl_nemo.memory import GIB, EngineRanks, ModelSize, rank_memory
from qarl_nemo.memory.candidates import AdaptedCandidate, Candidate
from qarl_nemo.memory.engine import engine_sizes
from qarl_nemo.parallelism import divisors, either
from qarl_nemo.train.lora import RANKS

_ENGINES = {"packed": "packed (the built-in sampler)", "vllm": "vllm"}
# Of `layouts`.
_MOST_TP = 4
_UNSERVED = "vLLM serves these weights on no number of GPUs (why: below the table). By memory alone: "


def learners_answer(
    model: ModelSize,
    found: Sequence[Candidate],
    gpu_bytes: float,
    engine: EngineRanks | None = None,
    *,
    served: bool = True,
) -> str:
    """Say which learner fits best, and how many others do.

    Args:
        model: the model's sizes.
        found: what `candidates` returned, at least one.
        gpu_bytes: memory of a GPU.
        engine: how GPUs share the engine that was asked for.
        served: whether vLLM takes the weights.

    Returns:
        One sentence; where nothing fits, the nearest, by how much it misses and what to change.
    """
    best, gpu = found[0], f"{gpu_bytes / GIB:g} GiB"
    if best.fits:
        others = sum(one.fits for one in found) - 1
        layerwise = ", its refit layer by layer" if best.refits and best.refits[0] > best.room else ""
        more = f"; {others} more below" if others else ""
        text = f"Fits {gpu}: {_name(best)} with up to {best.tokens:,} tokens a micro-batch{layerwise}{more}."
    else:
        text = (
            f"Nothing fits {gpu}. The nearest, {_name(best)}, misses by {with_unit(best.missing_bytes)} with "
            f"{best.learner.tokens:,} tokens a micro-batch. Change: {either(_changes(model, found, engine))}."
        )
    return text if served else f"{_UNSERVED}{text[0].lower()}{text[1:]}"


def adapters_answer(found: Sequence[AdaptedCandidate], gpu_bytes: float, tokens: int, rank: int) -> str:
    """Say with which rollout engines adapters on a frozen base fit one GPU.

    Args:
        found: what `adapted_candidates` returned.
        gpu_bytes: memory of the GPU.
        tokens: tokens of the micro-batch that was asked about.
        rank: the adapters' rank.

    Returns:
        One sentence; where nothing fits, the nearest, by how much it misses and what to change.
    """
    gpu = f"{gpu_bytes / GIB:g} GiB"
    if fitting := [one for one in found if one.fits]:
        budgets = [f"by {_ENGINES[one.engine]} with up to {one.tokens:,} tokens a micro-batch" for one in fitting]
        return f"Fits {gpu}: rollouts {', or '.join(budgets)}."
    nearest = min((one for one in found if one.served), key=lambda one: one.missing_bytes)
    return (
        f"Nothing fits {gpu}. The nearest, rollouts by {_ENGINES[nearest.engine]}, misses by "
        f"{with_unit(nearest.missing_bytes)} with {tokens:,} tokens a micro-batch. "
        f"Change: {either(_changes_of_adapters(nearest, rank))}."
    )


def _name(one: Candidate) -> str:
    recompute = {"full": "full recompute", "none": "no recompute"}[one.learner.recompute]
    return f"{one.ranks.name} + {one.learner.optimizer} + {recompute}"


def _changes(model: ModelSize, found: Sequence[Candidate], engine: EngineRanks | None) -> Iterator[str]:
    nearest = found[0]
    too_large = any(size > nearest.room for size in nearest.refits[-1:])
    if too_large and engine and _may_have_more(engine, model, nearest.ranks.num_gpus):
        yield "more GPUs an engine (--engine-tp, --engine-ep), because its refit does not fit"
    roomiest = max(found, key=lambda one: one.tokens or 0)
    if roomiest.tokens:
        yield f"--tokens {roomiest.tokens} (fits {_name(roomiest)})"
    if nearest.memory.peak_bytes > nearest.room:
        yield from _savings(model, nearest)
    elif saved := _kept_bytes(model, nearest):
        # A refit has them beside the engine, too.
        yield f"--no-keep-operand (saves {with_unit(saved)})"
    yield "more --gpus" if _more_gpus_share_more(model, nearest) else "more --gpus in a --layout with more tp, pp or cp"
    yield "--lora, which trains adapters on one GPU"


def _may_have_more(engine: EngineRanks, model: ModelSize, gpus: int) -> bool:
    experts_shared = max(engine.tp, engine.ep)
    more_for_experts = model.num_experts > 0 and experts_shared < divisors(gpus, model.num_experts)[-1]
    return more_for_experts or engine.tp < engine_sizes(model, gpus)[-1]


def _more_gpus_share_more(model: ModelSize, one: Candidate) -> bool:
    """Tell whether layouts that are looked at unasked take something off each GPU if there are more of them."""
    ranks, shared = one.ranks, gcd(model.num_heads, model.num_kv_heads, _MOST_TP)
    return one.memory.parts["optimizer"] > 0 or ranks.ep * ranks.etp < model.num_experts or ranks.tp < shared


def _kept_bytes(model: ModelSize, one: Candidate) -> float:
    without = rank_memory(model, one.ranks, replace(one.learner, keep_operand=False))
    return one.memory.parts["packed"] - without.parts["packed"]


def _savings(model: ModelSize, one: Candidate) -> Iterator[str]:
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--recompute full", {"recompute": "full"}),
        ("--optimizer adam_bf16", {"optimizer": "adam_bf16", "precision_aware": True}),
        ("--logprob-chunk 1024", {"logprob_chunk": 1024}),
        ("--no-keep-operand", {"keep_operand": False}),
        ("--gradient-bytes 2", {"gradient_bytes": 2}),
    )
    for option, changed in changes:
        peak_bytes = rank_memory(model, one.ranks, replace(one.learner, **changed)).peak_bytes
        if (saved := one.memory.peak_bytes - peak_bytes) > 0:
            yield f"{option} (saves {with_unit(saved)})"


def _changes_of_adapters(nearest: AdaptedCandidate, rank: int) -> Iterator[str]:
    memory = nearest.memory
    rollouts_miss, update_misses = memory.rollout_bytes - nearest.room, memory.update_bytes - nearest.room
    # The built-in sampler's cache is gone while the learner works, so that a smaller one helps rollouts alone.
    cache_misses = rollouts_miss if memory.shared else nearest.missing_bytes
    tenths = int((memory.parts["cache"] - cache_misses) / GIB * 10)
    if nearest.kept_bytes:
        yield f"--no-keep-operand (saves {with_unit(nearest.kept_bytes)})"
    if nearest.tokens:
        yield f"--tokens {nearest.tokens}"
    if cache_misses > 0 and tenths > 0:
        smaller_cache = f"--cache-gib {tenths / 10:g}"
        if update_misses <= 0 or not memory.shared:
            yield smaller_cache
        elif nearest.update_tokens:
            yield f"--tokens {nearest.update_tokens} together with {smaller_cache}"
    # Rollouts have no gradients; beside vLLM's own base its share of the adapters is too small to count.
    less = 1 - RANKS[0] / rank
    freed = less * (memory.parts["adapters"] + (memory.parts["engine"] if memory.shared else 0.0))
    if less and freed >= rollouts_miss and freed + less * memory.parts["gradients"] >= update_misses:
        yield "a lower --lora"
    yield "a larger GPU"
