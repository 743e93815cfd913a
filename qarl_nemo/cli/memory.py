"""`qarl memory`: what training needs on each GPU, and which layouts fit."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qarl_formats import DEFAULT_FORMAT
from qarl_nemo.architecture import FAMILIES, MEGATRON_FAMILIES
from qarl_nemo.cli import memory_options as options
from qarl_nemo.cli.options import GroupSize, NestedIn, given_options
from qarl_nemo.cli.program import command
from qarl_nemo.config.problems import attempt
from qarl_nemo.names import check_targets, split_targets

if TYPE_CHECKING:
    from qarl_nemo.memory import EngineRanks, Learner, ModelSize, Parallelism
    from qarl_nemo.memory.lora import Adapters

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
_OF_ADAPTERS = {"--lora-targets", "--cache-gib"}


@command
def memory(
    context: typer.Context,
    model: options.Model,
    gpus: options.Gpus = 8,
    gpu_gib: options.GpuGib = 79.0,
    layout: options.Layouts = None,
    format_name: options.Format = DEFAULT_FORMAT,
    group_size: GroupSize = None,
    nested_in: NestedIn = None,
    targets: options.QuantizedTargets = None,
    keep_operand: options.KeepOperand = True,
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
    from qarl_nemo.memory import GIB, OPTIMIZERS, ModelSize

    size = ModelSize.read(model, MEGATRON_FAMILIES if lora is None else tuple(FAMILIES))
    problems = _options_of_the_other(context, lora) + _gib_problems(gpu_gib=gpu_gib, cache_gib=cache_gib)
    learner = partial(_learner, problems, size, format_name, group_size, targets, tokens, keep_operand)
    if lora is not None:
        chunk = 1024 if logprob_chunk is None else logprob_chunk
        base = learner(logprob_chunk=chunk, recompute="full", logits=False, embedded=True)
        adapters = attempt(problems, _adapters, size, lora, lora_targets)
        _require_none(problems)
        _show_adapters(model, size, base, adapters, gpu_bytes=gpu_gib * GIB, cache_bytes=cache_gib * GIB)
        return
    alike = {"gradient_bytes": gradient_bytes, "logprob_chunk": logprob_chunk, "nested_in": nested_in}
    # Named twice, one would stand in the table twice.
    chosen = product(dict.fromkeys(optimizer or OPTIMIZERS), dict.fromkeys(recompute or ("full", "none")))
    # As NeMo-RL's recipes have Adam: BF16 moments need the precision-aware one, which takes gradients as they are.
    learners = [
        learner(**alike, optimizer=name, recompute=kind, precision_aware=name == "adam_bf16") for name, kind in chosen
    ]
    engine = attempt(problems, _engine, size, gpus, engine_tp, engine_ep)
    ranks = _layouts(problems, size, layout, gpus)
    _require_none(problems)
    refused, ranks = _refused(model, size, learners[0], ranks, engine, named=bool(layout))
    _show_learners(size, learners, ranks, engine, gpu_bytes=gpu_gib * GIB, refused=refused, show_all=show_all)


def _learner(
    problems: list[str],
    size: "ModelSize",
    format_name: str,
    group_size: int | None,
    targets: str | None,
    tokens: int,
    keep_operand: bool,
    **settings: Any,
) -> Any:
    from qarl_nemo.memory import Learner, named_targets, require_groups

    chosen = attempt(problems, named_targets, size, targets) or ()
    attempt(problems, require_groups, format_name, group_size)
    groups = 128 if group_size is None else group_size
    return attempt(problems, Learner, format_name, groups, chosen, tokens=tokens, keep_operand=keep_operand, **settings)


def _adapters(size: "ModelSize", rank: int, targets: str) -> "Adapters":
    from qarl_nemo.memory import require_targets
    from qarl_nemo.memory.lora import Adapters
    from qarl_nemo.train.lora import RANKS

    problems: list[str] = []
    chosen = attempt(problems, check_targets, split_targets(targets)) or ()
    if chosen:
        attempt(problems, require_targets, size, chosen)
    if rank not in RANKS:
        problems.append(f"lora={rank} is a rank that no engine serves; legal: {', '.join(map(str, RANKS))}")
    if problems:
        raise ValueError("\n".join(problems))
    return Adapters(rank, chosen)


def _engine(size: "ModelSize", gpus: int, tp: int | None, ep: int | None) -> "EngineRanks | None":
    from qarl_nemo.memory import EngineRanks

    if tp is None and ep is None:
        return None
    engine = EngineRanks(1 if tp is None else tp, 1 if ep is None else ep)
    engine.require(size, gpus)
    return engine


def _layouts(problems: list[str], size: "ModelSize", named: list[str] | None, gpus: int) -> "list[Parallelism]":
    from qarl_nemo.memory import Parallelism, layouts, named_layouts

    # A layout whose name is none does not look at the GPUs.
    attempt(problems, Parallelism, gpus)
    names = list(dict.fromkeys(named or []))
    found = attempt(problems, named_layouts, size, names, gpus) if names else attempt(problems, layouts, size, gpus)
    return found or []


def _refused(
    model: Path,
    size: "ModelSize",
    learner: "Learner",
    ranks: "list[Parallelism]",
    engine: "EngineRanks | None",
    *,
    named: bool,
) -> "tuple[list[str], list[Parallelism]]":
    # It imports torch, for which what is illegal does not wait.
    from qarl_nemo.cli.memory_checks import layouts_that_start, refusals

    refused = refusals(model, replace(learner, nested_in=None), engine)
    return refused, layouts_that_start(size, ranks, learner, named=named)


def _require_none(problems: list[str]) -> None:
    # Every learner has those of what all of them share.
    lines = dict.fromkeys(line for problem in problems for line in problem.splitlines())
    if lines:
        raise ValueError("\n  ".join([f"{len(lines)} problem(s), nothing was computed:", *lines]))


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
    model: Path, size: "ModelSize", base: "Learner", adapters: "Adapters", *, gpu_bytes: float, cache_bytes: float
) -> None:
    from rich.console import Console

    from qarl_nemo.cli.memory_answer import adapters_answer
    from qarl_nemo.cli.memory_checks import refusals, require_own_format
    from qarl_nemo.cli.memory_table_of_adapters import adapters_table
    from qarl_nemo.memory import EMBEDDED_PROCESS_BYTES
    from qarl_nemo.memory.candidates import adapted_candidates

    require_own_format(model, base)
    refused = refusals(model, base)
    room = gpu_bytes - EMBEDDED_PROCESS_BYTES
    found = adapted_candidates(size, base, adapters, room, cache_bytes, vllm_serves=not refused)
    console = Console(width=180)
    console.print(adapters_answer(found, gpu_bytes, base.tokens, adapters.rank), highlight=False)
    console.print(adapters_table(size, base, adapters, found, gpu_bytes, refused))


def _gib_problems(**sizes: float) -> list[str]:
    return [f"{name}={gib} must lie between 0 and {2**20}" for name, gib in sizes.items() if not 0 < gib <= 2**20]


def _options_of_the_other(context: typer.Context, lora: int | None) -> list[str]:
    of, fix = (
        (_OF_ADAPTERS, "of adapters on a frozen base; name their rank with --lora")
        if lora is None
        else (_OF_MEGATRON, "of a Megatron learner on several GPUs; leave it out with --lora")
    )
    wrong = [option for option in given_options(context) if option in of]
    return [f"{', '.join(wrong)}: {fix}"] if wrong else []
