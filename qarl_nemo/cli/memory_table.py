"""The tables of `qarl memory`, without and with `--lora`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from rich.table import Table

from qarl_nemo.memory import (
    ASLEEP_BYTES,
    EMBEDDED_PROCESS_BYTES,
    GIB,
    OVERHEAD_BYTES,
    PARTS,
    Learner,
    ModelSize,
    Parallelism,
    host_memory,
    largest_budget,
    rank_memory,
    refit_bytes,
)
from qarl_nemo.memory.lora import ADAPTED_PARTS, ENGINES, AdaptedMemory, Adapters, adapted_memory

# The optimizer's state stands beside the optimizer's name.
_HEADERS = {name: "state" if name == "optimizer" else name for name in PARTS}

# `host_memory` counts a constant once for each host; a GPU's share is shown for a host of this many.
_HOST_GPUS = 8
_NOT_SERVED = "[red]not served[/]"
_NONE_FITS = (
    "None fits: fewer --tokens, --logprob-chunk 1024 and --gradient-bytes 2 take less, or add --gpus; --lora trains "
    "adapters on one GPU."
)


def memory_table(
    model: ModelSize,
    layouts: Sequence[Parallelism],
    learners: Sequence[Learner],
    gpu_bytes: float,
    engine_tp: int | None = None,
    refusals: Sequence[str] = (),
) -> Table:
    """Return a table of what every layout and learner needs, and whether it fits.

    Args:
        model: the model's sizes.
        layouts: the layouts to compute.
        learners: the learners to compute in each layout, alike but for optimizer and recomputation.
        gpu_bytes: memory of a GPU.
        engine_tp: GPUs that share one rollout engine on the learner's GPUs. Adds three columns: a refit's peak as a
            whole and layer by layer, which must fit as well, and a GPU's share of the host's memory; everything must
            fit beside what the engine keeps asleep.
        refusals: why no engine takes the weights, however many GPUs it has.
    """
    beside = OVERHEAD_BYTES + (0 if engine_tp is None else ASLEEP_BYTES)
    room, first = gpu_bytes - beside, learners[0]
    title = (
        f"GiB of the fullest rank with {first.tokens:,} tokens a micro-batch and {', '.join(first.targets)} as "
        f"{first.format}; fits: peak and {beside / GIB:g} beside tensors in {gpu_bytes / GIB:g}"
    )
    sums = " + ".join(_HEADERS[name] for name in PARTS[:-2])
    caption = f"peak = {sums} + the larger of working and logits. tokens: the largest micro-batch that fits."
    refits: tuple[str, ...] = ()
    if engine_tp is not None:
        refits = ("refit", "layerwise", "host")
        caption += f"\n{_refit_caption(model, first, engine_tp)}"
    headers = (_HEADERS[name] for name in PARTS)
    columns = ("layout", "optimizer", "recompute", *headers, "peak", "fits", "tokens", *refits)
    table = Table(*columns, title=title, caption=caption, title_justify="left", caption_justify="left")
    fitting = False
    for ranks in layouts:
        for learner in learners:
            needed = rank_memory(model, ranks, learner)
            sizes = [f"{size / GIB:.1f}" for size in (*(needed.parts[name] for name in PARTS), needed.peak_bytes)]
            fits = _NOT_SERVED if refusals else "[green]yes[/]" if needed.peak_bytes <= room else "[red]no[/]"
            most = largest_budget(partial(_peak_bytes, model, ranks, learner), room)
            more = [] if engine_tp is None else _refit_columns(model, ranks, learner, engine_tp, room)
            table.add_row(ranks.name, learner.optimizer, learner.recompute, *sizes, fits, str(most or "-"), *more)
            fitting |= needed.peak_bytes <= room
    table.caption = "\n".join([caption, *([] if fitting else [_NONE_FITS]), *_served_by_none(refusals)])
    return table


def _served_by_none(refusals: Sequence[str]) -> list[str]:
    if not refusals:
        return []
    return [
        "not served: vLLM does not take these weights on any number of GPUs, only the built-in sampler does:",
        *(f"  {refusal}" for refusal in refusals),
    ]


def _refit_columns(
    model: ModelSize, ranks: Parallelism, learner: Learner, engine_tp: int, room: float
) -> Iterator[str]:
    for layerwise in (False, True):
        size = refit_bytes(model, ranks, learner, engine_tp, layerwise=layerwise)
        yield f"[{'green' if size <= room else 'red'}]{size / GIB:.1f}[/]"
    yield f"{sum(_host(model, ranks, learner, engine_tp).values()) / GIB:.1f}"


def _refit_caption(model: ModelSize, learner: Learner, engine_tp: int) -> str:
    parts = _host(model, Parallelism(engine_tp), learner, engine_tp)
    return (
        "refit, layerwise: a GPU's peak while its engine gets all weights at once, or one layer at a time. host: a "
        f"GPU's share of the memory of a host of {_HOST_GPUS}: the engine's weights ({parts['engines'] / GIB:.1f}), "
        f"processes ({parts['processes'] / GIB:g}, fitted), and parameters and state, which leave while it runs."
    )


def _host(model: ModelSize, ranks: Parallelism, learner: Learner, engine_tp: int) -> dict[str, float]:
    leave = {"parameters_leave": True, "optimizer_leaves": True}
    host = host_memory(model, ranks, learner, learner, gpus=_HOST_GPUS, engine_tp=engine_tp, **leave)
    return {name: size / _HOST_GPUS for name, size in host.items()}


def _peak_bytes(model: ModelSize, ranks: Parallelism, learner: Learner, tokens: int) -> float:
    return rank_memory(model, ranks, replace(learner, tokens=tokens)).peak_bytes


def lora_table(
    model: ModelSize,
    learner: Learner,
    adapters: Adapters,
    gpu_bytes: float,
    cache_bytes: float,
    refusals: Sequence[str] = (),
) -> Table:
    """Return a table of what one GPU holds with each rollout engine, also with one that serves no adapters there.

    Args:
        model: the model's sizes.
        learner: format and targets of the base, and the tokens of a micro-batch.
        adapters: what is trained.
        gpu_bytes: memory of the GPU.
        cache_bytes: keys and values of the responses that are sampled together.
        refusals: why no kernel of vLLM takes the weights.
    """
    title = (
        f"GiB of one GPU: adapters of rank {adapters.rank} on {', '.join(adapters.targets)} "
        f"({adapters.num_parameters(model) / 1e6:,.1f} M parameters), {learner.tokens:,} tokens a micro-batch, base "
        f"{', '.join(learner.targets)} as {learner.format}"
    )
    caption = (
        "rollout = base + adapters + engine + cache; update = base + adapters + gradients + engine + activations + "
        "the larger of working and logits, and the cache, too, where the engine keeps it.\n"
        f"fits: the larger of the two and {EMBEDDED_PROCESS_BYTES / GIB:g} beside tensors in {gpu_bytes / GIB:g}. "
        "tokens: the largest micro-batch that fits."
    )
    caption = "\n".join([caption, *_served_by_none(refusals)])
    columns = ("rollouts by", *ADAPTED_PARTS, "rollout", "update", "fits", "tokens")
    table = Table(*columns, title=title, caption=caption, title_justify="left", caption_justify="left")
    for engine in ENGINES:
        memory = partial(adapted_memory, model, adapters=adapters, engine=engine, cache_bytes=cache_bytes)
        needed = memory(learner)
        sizes = [*(needed.parts[name] for name in ADAPTED_PARTS), needed.rollout_bytes, needed.update_bytes]
        fits = "[green]yes[/]" if needed.peak_bytes + EMBEDDED_PROCESS_BYTES <= gpu_bytes else "[red]no[/]"
        most = largest_budget(partial(_adapted_peak_bytes, memory, learner), gpu_bytes - EMBEDDED_PROCESS_BYTES)
        beside = learner.record is None or learner.record.runs_beside_adapters(learner.targets)
        if engine == "vllm" and (refusals or not beside):
            fits, most = _NOT_SERVED, None
        table.add_row(engine, *(f"{size / GIB:.1f}" for size in sizes), fits, str(most or "-"))
    return table


def _adapted_peak_bytes(memory: Callable[[Learner], AdaptedMemory], learner: Learner, tokens: int) -> float:
    return memory(replace(learner, tokens=tokens)).peak_bytes
