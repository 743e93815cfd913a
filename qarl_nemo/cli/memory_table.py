"""The table of `qarl memory` without `--lora`: what learners need, part by part."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from qarl_nemo.cli.memory_units import Unit
from qarl_nemo.memory import GIB, PARTS, EngineRanks, Learner, ModelSize, Parallelism, host_memory
from qarl_nemo.memory.candidates import ORDER, Candidate

NOT_SERVED = "[red]not served[/]"
# The optimizer's state stands beside the optimizer's name.
_HEADERS = {name: "state" if name == "optimizer" else name for name in PARTS}
# `host_memory` counts a constant once for each host; a GPU's share is shown for a host of this many.
_HOST_GPUS = 8


def memory_table(
    model: ModelSize,
    shown: Sequence[Candidate],
    gpu_bytes: float,
    engine: EngineRanks | None = None,
    refusals: Sequence[str] = (),
    hidden: int = 0,
) -> Table:
    """Return a table of what learners in their layouts need.

    Args:
        model: the model's sizes.
        shown: the rows, at least one; alike but for layout, optimizer and recomputation.
        gpu_bytes: memory of a GPU.
        engine: how GPUs share one rollout engine on the learner's GPUs. Adds three columns: a refit's peak as a
            whole and layer by layer, and a GPU's share of the host's memory.
        refusals: why no engine takes the weights, however many GPUs it has.
        hidden: how many others do not fit and are left out.
    """
    unit, first = Unit.of(max(one.memory.peak_bytes for one in shown)), shown[0]
    title = (
        f"{unit.name} of the fullest rank with {first.learner.tokens:,} tokens a micro-batch and "
        f"{', '.join(first.learner.targets)} as {first.learner.format}; fits: peak and "
        f"{(gpu_bytes - first.room) / GIB:g} GiB beside tensors in {gpu_bytes / GIB:g}"
    )
    sums = " + ".join(_HEADERS[name] for name in PARTS[:-2])
    caption = [
        f"peak = {sums} + the larger of working and logits. tokens: the largest micro-batch that fits.",
        *_step_caption(shown),
        *operand_caption(first.learner, "packed"),
        *([f"The best first: {ORDER}."] if len(shown) > 1 else []),
        *([f"Not shown, because they do not fit: {hidden}; --all shows them."] if hidden else []),
        *([] if engine is None else [_refit_caption(model, first.learner, engine, unit)]),
        *served_by_none(refusals),
    ]
    refits = () if engine is None else ("refit", "layerwise", "host")
    columns = ("layout", "optimizer", "recompute", *_HEADERS.values(), "peak", "fits", "tokens", *refits)
    table = Table(*columns, title=title, caption="\n".join(caption), title_justify="left", caption_justify="left")
    for one in shown:
        sizes = [unit.text(size) for size in (*(one.memory.parts[name] for name in PARTS), one.memory.peak_bytes)]
        fits = NOT_SERVED if refusals else "[green]yes[/]" if one.fits else "[red]no[/]"
        more = [] if engine is None else _refit_columns(model, one, engine, unit)
        names = (one.ranks.name, one.learner.optimizer, one.learner.recompute)
        table.add_row(*names, *sizes, fits, str(one.tokens or "-"), *more)
    return table


def _step_caption(shown: Sequence[Candidate]) -> list[str]:
    names = dict.fromkeys(one.learner.optimizer for one in shown if one.memory.step_decides)
    if not names:
        return []
    step = "weights + gradients + state + the FP32 copies of gradients that a step makes"
    return [f"With {' and '.join(names)} a step needs more, {step}: there it is the peak."]


def served_by_none(refusals: Sequence[str]) -> list[str]:
    """Return lines that say why vLLM takes some weights on no number of GPUs; none if it takes them."""
    if not refusals:
        return []
    return [
        "not served: vLLM does not take these weights on any number of GPUs, only the built-in sampler does:",
        *(f"  {refusal}" for refusal in refusals),
    ]


def operand_caption(learner: Learner, part: str) -> list[str]:
    """Return a line that says whether a part has what GEMMs multiply, too; none where that is the weights themselves.

    Args:
        learner: its format and `keep_operand`.
        part: the column that has it.
    """
    if learner.record is None or not learner.record.operand_bytes:
        return []
    if learner.keep_operand:
        return [f"{part}: with what GEMMs multiply, which runs keep by default; --no-keep-operand leaves it out."]
    return [f"{part}: for runs with qarl.keep_operand=false, which is not the default."]


def _refit_columns(model: ModelSize, one: Candidate, engine: EngineRanks, unit: Unit) -> Iterator[str]:
    for size in one.refits:
        yield f"[{'green' if size <= one.room else 'red'}]{unit.text(size)}[/]"
    yield unit.text(sum(_host(model, one.ranks, one.learner, engine).values()))


def _refit_caption(model: ModelSize, learner: Learner, engine: EngineRanks, unit: Unit) -> str:
    parts = _host(model, Parallelism(engine.tp), learner, engine)
    return (
        "refit, layerwise: a GPU's peak while its engine gets all weights at once, or one layer at a time; fits needs "
        f"room for the second. host: a GPU's share of the memory of a host of {_HOST_GPUS}: processes "
        f"({unit.text(parts['processes'])}, fitted), and parameters and state, which leave while the engine runs."
    )


def _host(model: ModelSize, ranks: Parallelism, learner: Learner, engine: EngineRanks) -> dict[str, float]:
    engines = {"engine_tp": engine.tp, "engine_ep": engine.ep, "engines_forget": True}
    leave = {"parameters_leave": True, "optimizer_leaves": True}
    host = host_memory(model, ranks, learner, learner, gpus=_HOST_GPUS, **engines, **leave)
    return {name: size / _HOST_GPUS for name, size in host.items()}
