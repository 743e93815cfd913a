"""The table of `qarl memory --lora`."""

from collections.abc import Callable
from dataclasses import replace

from rich.table import Table

from qarl_nemo.memory import GIB, OVERHEAD_BYTES, Learner, ModelSize, largest_budget
from qarl_nemo.memory.lora import ADAPTED_PARTS, ENGINES, AdaptedMemory, Adapters, adapted_memory


def lora_table(model: ModelSize, learner: Learner, adapters: Adapters, gpu_bytes: float, cache_bytes: float) -> Table:
    """Return a table of what one GPU holds with each rollout engine.

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
    table = Table("engine", *ADAPTED_PARTS, "rollout", "update", "fits", "tokens", title=title)
    for engine in ENGINES:

        def memory(tokens: int, engine: str = engine) -> AdaptedMemory:
            chosen = replace(learner, tokens=tokens)
            return adapted_memory(model, chosen, adapters, engine=engine, cache_bytes=cache_bytes)

        def peak_bytes(tokens: int, memory: Callable[[int], AdaptedMemory] = memory) -> float:
            return memory(tokens).peak_bytes

        needed = memory(learner.tokens)
        sizes = [*(needed.parts[name] for name in ADAPTED_PARTS), needed.rollout_bytes, needed.update_bytes]
        fits = "[green]yes[/]" if needed.peak_bytes + OVERHEAD_BYTES <= gpu_bytes else "[red]no[/]"
        most = largest_budget(peak_bytes, gpu_bytes - OVERHEAD_BYTES)
        table.add_row(engine, *(f"{size / GIB:.1f}" for size in sizes), fits, str(most or "-"))
    return table
