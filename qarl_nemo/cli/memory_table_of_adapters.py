"""The table of `qarl memory --lora`: what one GPU holds with each rollout engine."""

from collections.abc import Sequence

from rich.table import Table

from qarl_nemo.cli.memory_table import NOT_SERVED, operand_caption, served_by_none
from qarl_nemo.cli.memory_units import Unit
from qarl_nemo.memory import EMBEDDED_PROCESS_BYTES, GIB, Learner, ModelSize
from qarl_nemo.memory.candidates import AdaptedCandidate
from qarl_nemo.memory.lora import ADAPTED_PARTS, Adapters


def adapters_table(
    model: ModelSize,
    learner: Learner,
    adapters: Adapters,
    found: Sequence[AdaptedCandidate],
    gpu_bytes: float,
    refusals: Sequence[str] = (),
) -> Table:
    """Return a table of what one GPU holds with each rollout engine, also with one that serves no adapters there.

    Args:
        model: the model's sizes.
        learner: format and targets of the base, and the tokens of a micro-batch.
        adapters: what is trained.
        found: the rows.
        gpu_bytes: memory of the GPU.
        refusals: why no kernel of vLLM takes the weights.
    """
    # The cache is as large as was asked for, and what vLLM takes beside its weights the same for every model.
    unit = Unit.of(max(size for name, size in found[0].memory.parts.items() if name not in ("cache", "engine")))
    title = (
        f"{unit.name} of one GPU: adapters of rank {adapters.rank} on {', '.join(adapters.targets)} "
        f"({adapters.num_parameters(model) / 1e6:,.1f} M parameters), {learner.tokens:,} tokens a micro-batch, base "
        f"{', '.join(learner.targets)} as {learner.format}"
    )
    caption = (
        "rollout = base + adapters + engine + cache; update = base + adapters + gradients + engine + activations + "
        "the larger of working and logits, and the cache, too, where the engine keeps it.",
        f"fits: the larger of the two and {EMBEDDED_PROCESS_BYTES / GIB:g} GiB beside tensors in {gpu_bytes / GIB:g}. "
        "tokens: the largest micro-batch that fits.",
        *operand_caption(learner, "base"),
        *served_by_none(refusals),
    )
    columns = ("rollouts by", *ADAPTED_PARTS, "rollout", "update", "fits", "tokens")
    table = Table(*columns, title=title, caption="\n".join(caption), title_justify="left", caption_justify="left")
    for one in found:
        parts = (one.memory.parts[name] for name in ADAPTED_PARTS)
        sizes = [unit.text(size) for size in (*parts, one.memory.rollout_bytes, one.memory.update_bytes)]
        fits = "[green]yes[/]" if one.fits else "[red]no[/]" if one.served else NOT_SERVED
        table.add_row(one.engine, *sizes, fits, str(one.tokens or "-"))
    return table
