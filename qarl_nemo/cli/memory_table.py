"""The tables of `qarl memory`, without and with `--lora`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rich.table import Table

from qarl_nemo.memory import (
    ASLEEP_BYTES,
    GIB,
    OVERHEAD_BYTES,
    PARTS,
    Learner,
    ModelSize,
    Parallelism,
    largest_budget,
    rank_memory,
    refit_bytes,
)
from qarl_nemo.memory.lora import ADAPTED_PARTS, ENGINES, AdaptedMemory, Adapters, adapted_memory


def memory_table(
    model: ModelSize,
    layouts: Sequence[Parallelism],
    learners: Sequence[Learner],
    gpu_bytes: float,
    engine_tp: int | None = None,
) -> Table:
    """Return a table of what every layout and learner needs, and whether it fits.

    Args:
        model: the model's sizes.
        layouts: the layouts to compute.
        learners: the learners to compute in each layout.
        gpu_bytes: memory of a GPU.
        engine_tp: GPUs that share one rollout engine on the learner's GPUs. Adds two columns, a refit's peak as a whole
            and layer by layer, which must fit as well; everything must, beside what the engine keeps asleep.
    """
    beside = OVERHEAD_BYTES + (0 if engine_tp is None else ASLEEP_BYTES)
    room = f"{beside / GIB:g} beside its tensors it must fit in {gpu_bytes / GIB:g}"
    title = f"GiB of each rank; with {room}; tokens: the largest micro-batch that does"
    refits = () if engine_tp is None else ("refit", "layerwise")
    table = Table("layout", "optimizer", "recompute", *PARTS, "peak", "fits", "tokens", *refits, title=title)

    def marked(size: float) -> str:
        color = "green" if size + beside <= gpu_bytes else "red"
        return f"[{color}]{size / GIB:.1f}[/]"

    for ranks in layouts:
        for learner in learners:
            needed = rank_memory(model, ranks, learner)
            sizes = [f"{size / GIB:.1f}" for size in (*(needed.parts[name] for name in PARTS), needed.peak_bytes)]
            fits = "[green]yes[/]" if needed.peak_bytes + beside <= gpu_bytes else "[red]no[/]"
            peaks = (
                []
                if engine_tp is None
                else [marked(refit_bytes(model, ranks, learner, engine_tp, layerwise=kind)) for kind in (False, True)]
            )
            most = largest_budget(partial(_peak_bytes, model, ranks, learner), gpu_bytes - beside)
            table.add_row(ranks.name, learner.optimizer, learner.recompute, *sizes, fits, str(most or "-"), *peaks)
    return table


def _peak_bytes(model: ModelSize, ranks: Parallelism, learner: Learner, tokens: int) -> float:
    return rank_memory(model, ranks, replace(learner, tokens=tokens)).peak_bytes


def lora_table(model: ModelSize, learner: Learner, adapters: Adapters, gpu_bytes: float, cache_bytes: float) -> Table:
    """Return a table of what one GPU holds with each rollout engine, also with one that serves no adapters there.

    Args:
        model: the model's sizes.
        learner: format and targets of the base, and the tokens of a micro-batch.
        adapters: what is trained.
        gpu_bytes: memory of the GPU.
        cache_bytes: keys and values of the responses that are sampled together.
    """
    trained = f"{adapters.num_parameters(model) / 1e6:,.1f} M parameters"
    title = (
        f"GiB of one GPU that trains {trained} (rank {adapters.rank}, {', '.join(adapters.targets)}); "
        f"with {OVERHEAD_BYTES / GIB:g} beside its tensors it must fit in {gpu_bytes / GIB:g}; tokens: the largest "
        "micro-batch that does"
    )
    table = Table("rollouts by", *ADAPTED_PARTS, "rollout", "update", "fits", "tokens", title=title)
    for engine in ENGINES:
        memory = partial(adapted_memory, model, adapters=adapters, engine=engine, cache_bytes=cache_bytes)
        needed = memory(learner)
        sizes = [*(needed.parts[name] for name in ADAPTED_PARTS), needed.rollout_bytes, needed.update_bytes]
        fits = "[green]yes[/]" if needed.peak_bytes + OVERHEAD_BYTES <= gpu_bytes else "[red]no[/]"
        most = largest_budget(partial(_adapted_peak_bytes, memory, learner), gpu_bytes - OVERHEAD_BYTES)
        if engine == "vllm" and learner.record and not learner.record.runs_beside_adapters(learner.targets):
            fits, most = "[red]not served[/]", None
        table.add_row(engine, *(f"{size / GIB:.1f}" for size in sizes), fits, str(most or "-"))
    return table


def _adapted_peak_bytes(memory: Callable[[Learner], AdaptedMemory], learner: Learner, tokens: int) -> float:
    return memory(replace(learner, tokens=tokens)).peak_bytes
