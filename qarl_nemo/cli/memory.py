"""`qarl memory`: what training needs on each GPU, and which layouts fit."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qarl_formats import DEFAULT_FORMAT
from qarl_nemo.architecture import FAMILIES, MEGATRON_FAMILIES
from qarl_nemo.cli import memory_options as options
from qarl_nemo.cli.options import GroupSize, NestedIn, ServedFormat, given_options
from qarl_nemo.cli.program import command

if TYPE_CHECKING:
    from qarl_nemo.memory import EngineRanks, Learner, ModelSize, Parallelism

_OF_MEGATRON = {
    "--all",
    "--engine-ep",
    "--engine-tp",
    "--gpus",
    "--gradient-bytes",
    "--layout",
    "--nested-in",
    "--optimizer",
    "--recompute",
}
_OF_ADAPTERS = ("--lora-targets", "--cache-gib")


@command
def memory(
    context: typer.Context,
    model: options.Model,
    gpus: options.Gpus = 8,
    gpu_gib: options.GpuGib = 79.0,
    layout: options.Layouts = None,
    format_name: ServedFormat = DEFAULT_FORMAT,
    group_size: GroupSize = None,
    nested_in: NestedIn = None,
    targets: options.QuantizedTargets = None,
    keep_operand: options.KeepOperand = False,
    tokens: options.Tokens = 8192,
    optimizer: options.Optimizers = None,
    recompute: options.Recomputes = None,
    gradient_bytes: options.GradientBytes = 4,
    logprob_chunk: options.LogprobChunk = None,
    engine_tp: options.EngineTp = None,
    engine_ep: options.EngineEp = None,
    lora: options.LoraRank = None,
    lora_targets: options.LoraTargets = "attention",
    cache_gib: options.CacheGib = 16.0,
    show_all: options.ShowAll = False,
) -> None:
    """Compute what training needs on each GPU, and which layouts fit; nothing is started.

    The learner is Megatron's, or with --lora that of `qarl train` with adapters on a frozen base, on one GPU. A
    NeMo-RL config says itself what it needs: `run_qarl_grpo.py --check`.
    """
    from qarl_nemo.memory import GIB, OPTIMIZERS, ModelSize, named_learner

    size = ModelSize.read(model, MEGATRON_FAMILIES if lora is None else tuple(FAMILIES))
    base = replace(named_learner(size, format_name, group_size, targets), keep_operand=keep_operand)
    _require_gib("gpu_gib", gpu_gib)
    if lora is not None:
        _require_lora_options(context)
        base = replace(base, tokens=tokens, logprob_chunk=1024 if logprob_chunk is None else logprob_chunk)
        _show_adapters(model, size, base, rank=lora, targets=lora_targets, gpu_gib=gpu_gib, cache_gib=cache_gib)
        return
    _require_megatron_options(context)
    engine = _engine(size, gpus, engine_tp, engine_ep)
    # It imports torch, for which what is illegal so far does not wait.
    from qarl_nemo.cli.memory_checks import refusals

    refused = refusals(model, base, engine)
    alike = {"tokens": tokens, "gradient_bytes": gradient_bytes, "logprob_chunk": logprob_chunk, "nested_in": nested_in}
    chosen = product(optimizer or OPTIMIZERS, recompute or ("full", "none"))
    learners = [replace(base, **alike, optimizer=name, recompute=kind) for name, kind in chosen]
    ranks = _layouts(size, learners[0], layout, gpus)
    _show_learners(size, learners, ranks, engine, gpu_bytes=gpu_gib * GIB, refused=refused, show_all=show_all)


def _engine(size: "ModelSize", gpus: int, tp: int | None, ep: int | None) -> "EngineRanks | None":
    from qarl_nemo.memory import EngineRanks

    if tp is None and ep is None:
        return None
    engine = EngineRanks(1 if tp is None else tp, 1 if ep is None else ep)
    engine.require(size, gpus)
    return engine


def _layouts(size: "ModelSize", learner: "Learner", named: list[str] | None, gpus: int) -> "list[Parallelism]":
    from qarl_nemo.cli.memory_checks import layouts_that_start
    from qarl_nemo.memory import layouts, named_layouts

    ranks = named_layouts(size, named, gpus) if named else layouts(size, gpus)
    return layouts_that_start(size, ranks, learner, named=bool(named))


def _show_learners(
    size: "ModelSize",
    learners: list["Learner"],
    ranks: "list[Parallelism]",
    engine: "EngineRanks | None",
    *,
    gpu_bytes: float,
    refused: list[str],
    show_all: bool,
) -> None:
    from rich.console import Console

    from qarl_nemo.cli.memory_answer import learners_answer
    from qarl_nemo.cli.memory_table import memory_table
    from qarl_nemo.memory import ASLEEP_BYTES, OVERHEAD_BYTES
    from qarl_nemo.memory.candidates import candidates

    room = gpu_bytes - OVERHEAD_BYTES - (0 if engine is None else ASLEEP_BYTES)
    found = candidates(size, ranks, learners, room, engine)
    # Where nothing fits, the parts of the nearest say what to change.
    shown = found if show_all else [one for one in found if one.fits] or found[:1]
    console = Console(width=180)
    console.print(learners_answer(size, found, gpu_bytes, engine, served=not refused), highlight=False)
    console.print(memory_table(size, shown, gpu_bytes, engine, refused, hidden=len(found) - len(shown)))


def _show_adapters(
    model: Path, size: "ModelSize", base: "Learner", *, rank: int, targets: str, gpu_gib: float, cache_gib: float
) -> None:
    from rich.console import Console

    from qarl_nemo.cli.memory_answer import adapters_answer
    from qarl_nemo.cli.memory_checks import named_adapters, refusals, require_own_format
    from qarl_nemo.cli.memory_table_of_adapters import adapters_table
    from qarl_nemo.memory import EMBEDDED_PROCESS_BYTES, GIB
    from qarl_nemo.memory.candidates import adapted_candidates

    require_own_format(model, base)
    refused = refusals(model, base)
    adapters = named_adapters(size, rank, targets)
    _require_gib("cache_gib", cache_gib)
    gpu_bytes, cache_bytes = gpu_gib * GIB, cache_gib * GIB
    base = replace(base, recompute="full", logits=False)
    room = gpu_bytes - EMBEDDED_PROCESS_BYTES
    found = adapted_candidates(size, base, adapters, room, cache_bytes, vllm_serves=not refused)
    console = Console(width=180)
    console.print(adapters_answer(found, gpu_bytes, base.tokens), highlight=False)
    console.print(adapters_table(size, base, adapters, found, gpu_bytes, refused))


def _require_gib(name: str, gib: float) -> None:
    if not 0 < gib <= 2**20:
        raise ValueError(f"{name}={gib} must lie between 0 and {2**20}")


def _require_lora_options(context: typer.Context) -> None:
    if wrong := sorted(_OF_MEGATRON.intersection(given_options(context))):
        raise ValueError(f"{', '.join(wrong)}: of a Megatron learner on several GPUs; leave it out with --lora")


def _require_megatron_options(context: typer.Context) -> None:
    if alone := [option for option in given_options(context) if option in _OF_ADAPTERS]:
        raise ValueError(f"{', '.join(alone)}: of adapters on a frozen base; name their rank with --lora")
