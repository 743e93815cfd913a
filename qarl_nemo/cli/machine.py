"""`qarl doctor` and `qarl memory`: what a machine can run."""

import shlex
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from qarl_formats import DEFAULT_FORMAT, find_format, formats_with_groups
from qarl_nemo.architecture import FAMILIES, MEGATRON_FAMILIES, config_file
from qarl_nemo.cli.options import GroupSize, NestedIn, ServedFormat, Targets, settings_of
from qarl_nemo.cli.program import command
from qarl_nemo.names import check_targets, split_targets

if TYPE_CHECKING:
    from qarl_nemo.memory import Learner, ModelSize, Parallelism


@command
def doctor(
    context: typer.Context,
    rollout: Annotated[
        Path | None,
        typer.Option(
            help="Measure vLLM on this machine instead, with dummy weights, in every format: a Hugging Face Qwen, "
            "Llama or Mistral folder, or its config.json. The options below are for this."
        ),
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="Repeat for several. Default: all; speed-ups are over bf16.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Elements per scale along K, of integer formats.")] = None,
    targets: Targets = "experts",
    batch_sizes: Annotated[
        list[int] | None, typer.Option("--batch-size", help="Repeat for several. Default: 32, 128, 512.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Decoding steps that are timed.")] = 128,
    repeats: Annotated[int, typer.Option(help="Measurements of each figure; the median is reported.")] = 5,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    enable_expert_parallel: Annotated[bool, typer.Option(help="Place whole experts on each GPU, not slices.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU that vLLM takes.")] = 0.9,
    output: Annotated[
        Path, typer.Option(help="Folder of the results; repeating the command resumes from what it holds.")
    ] = Path("runs/rollout_speed"),
    record: Annotated[Path | None, typer.Option(help="Results file (docs/results) to add the figures to.")] = None,
) -> None:
    """Say what this machine can run and what is missing; with --rollout, how fast vLLM samples in every format."""
    given = locals()
    from qarl_nemo.measure.doctor import measure_rollouts, show_findings

    if rollout is None:
        _require_no_options(context)
        show_findings()
        return
    from qarl_nemo.measure.speed.settings import ALL_FORMATS, RolloutSpeedSettings

    settings = settings_of(
        RolloutSpeedSettings,
        given,
        model=rollout,
        formats=tuple(formats or ALL_FORMATS),
        targets=tuple(split_targets(targets)),
        batch_sizes=tuple(batch_sizes or (32, 128, 512)),
    )
    measure_rollouts(settings, output, record, command=f"qarl {shlex.join(sys.argv[1:])}")


@command
def memory(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            help="Hugging Face Qwen3, Qwen3-MoE or Qwen2 folder, or its config.json; with --lora also Llama, Mistral."
        ),
    ],
    gpus: Annotated[int, typer.Option(help="GPUs that share the model.")] = 8,
    gpu_gib: Annotated[float, typer.Option(help="Memory of each, in GiB: 79 for an H100, 139 for an H200.")] = 79.0,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="Parallel sizes, the rest is data parallel: dp, ep8, tp2_ep8; repeat. Default: several."),
    ] = None,
    format_name: ServedFormat = DEFAULT_FORMAT,
    group_size: GroupSize = None,
    nested_in: NestedIn = None,
    targets: Annotated[
        str | None,
        typer.Option(help="What is quantized: experts, attention, mlp. Default: experts, or a dense model's mlp."),
    ] = None,
    keep_operand: Annotated[bool, typer.Option(help="Keep what the learner's GEMMs multiply.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch, before tp and cp ranks share it.")] = 8192,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="adam, adam_bf16 (BF16 moments), muon, offloaded (to the host); repeat. Default: all."),
    ] = None,
    recompute: Annotated[
        list[str] | None, typer.Option(help="Activation checkpointing: full or none; repeat. Default: both.")
    ] = None,
    gradient_bytes: Annotated[
        int, typer.Option(help="Bytes of one gradient element: 4, or 2 without grad_reduce_in_fp32.")
    ] = 4,
    logprob_chunk: Annotated[
        int | None,
        typer.Option(help="Tokens whose log-probabilities are computed at a time. Default: all; with --lora 1024."),
    ] = None,
    engine_tp: Annotated[
        int | None,
        typer.Option(help="GPUs of one rollout engine on the learner's GPUs: adds a refit's peaks and host memory."),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(help="Rank: compute one GPU of qarl train with adapters on a frozen base, learner and engine."),
    ] = None,
    lora_targets: Annotated[str, typer.Option(help="What has adapters: experts, attention, mlp.")] = "attention",
    cache_gib: Annotated[float, typer.Option(help="With --lora: keys and values of the rollouts, in GiB.")] = 16.0,
) -> None:
    """Compute what training needs on each GPU, and which layouts fit; nothing is started.

    The learner is Megatron's, or with --lora that of `qarl train` with adapters on a frozen base, on one GPU. A
    NeMo-RL config says itself what it needs: `run_qarl_grpo.py --check`.
    """
    from qarl_nemo.memory import OPTIMIZERS, ModelSize

    size = ModelSize.read(model, MEGATRON_FAMILIES if lora is None else tuple(FAMILIES))
    base = replace(_base_learner(size, format_name, group_size, targets), keep_operand=keep_operand)
    _require_size("gpu_gib", gpu_gib)
    if lora is not None:
        _require_lora_options(context)
        _require_own_format(model, base)
        adapted = replace(base, tokens=tokens, logprob_chunk=1024 if logprob_chunk is None else logprob_chunk)
        _show_lora_memory(size, adapted, (lora, lora_targets), gpu_gib, cache_gib, _refusals(model, adapted))
        return
    _require_megatron_options(context, engine_tp, {"GPUs": gpus, "attention heads": size.num_heads})
    refusals = _refusals(model, base, engine_tp)
    alike = {"tokens": tokens, "gradient_bytes": gradient_bytes, "logprob_chunk": logprob_chunk, "nested_in": nested_in}
    chosen = product(optimizer or OPTIMIZERS, recompute or ("full", "none"))
    learners = [replace(base, **alike, optimizer=name, recompute=kind) for name, kind in chosen]
    _show_memory(size, learners, layout, (gpus, gpu_gib), engine_tp, refusals)


def _base_learner(size: "ModelSize", format_name: str, group_size: int | None, targets: str | None) -> "Learner":
    from qarl_nemo.memory import Learner, require_targets

    usual = "experts" if size.num_experts else "mlp"
    chosen = check_targets(split_targets(usual if targets is None else targets))
    require_targets(size, chosen)
    if group_size is not None and find_format(format_name) and format_name not in (grouped := formats_with_groups()):
        raise ValueError(f"format {format_name!r} takes no group_size; {', '.join(grouped)} have one: remove it")
    return Learner(format_name, 128 if group_size is None else group_size, chosen)


def _show_memory(
    size: "ModelSize",
    learners: list["Learner"],
    layout: list[str] | None,
    machine: tuple[int, float],
    engine_tp: int | None,
    refusals: list[str],
) -> None:
    from rich.console import Console

    from qarl_nemo.cli.memory_table import memory_table
    from qarl_nemo.memory import layouts

    gpus, gpu_gib = machine
    ranks = _named_layouts(size, layout, gpus) if layout else layouts(size, gpus)
    problems = {one.name: _shard_problems(size, one, learners[0]) for one in ranks}
    ranks = [one for one in ranks if not problems[one.name]]
    if not ranks or (layout and any(problems.values())):
        listed = [f"layout {name}: {problem}" for name, found in problems.items() for problem in found]
        raise ValueError("the learner would not start:\n  " + "\n  ".join(listed))
    Console(width=160).print(memory_table(size, ranks, learners, gpu_gib * 2**30, engine_tp, refusals))


def _named_layouts(size: "ModelSize", layout: list[str], gpus: int) -> list["Parallelism"]:
    from qarl_nemo.memory import Parallelism, require_layout

    found, problems = [], []
    for text in layout:
        try:
            found.append(Parallelism.parse(text, gpus))
            require_layout(size, found[-1])
        except ValueError as error:
            problems.append(f"{text}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _shard_problems(size: "ModelSize", ranks: "Parallelism", learner: "Learner") -> list[str]:
    from qarl_nemo.megatron.alignment import Alignment
    from qarl_nemo.megatron.checks import shard_problems

    sizes = {
        "hidden_size": size.hidden,
        "moe_ffn_hidden_size": size.inner,
        "ffn_hidden_size": size.inner,
        "kv_channels": size.head_dim,
        "num_attention_heads": size.num_heads,
        "num_query_groups": size.num_kv_heads,
        "tensor_model_parallel_size": ranks.tp,
        "expert_tensor_parallel_size": ranks.etp,
    }
    assert learner.record is not None
    return shard_problems(SimpleNamespace(**sizes), Alignment(learner.record, learner.targets))


def _show_lora_memory(
    size: "ModelSize",
    base: "Learner",
    lora: tuple[int, str],
    gpu_gib: float,
    cache_gib: float,
    refusals: list[str],
) -> None:
    from rich.console import Console

    from qarl_nemo.cli.memory_table import lora_table
    from qarl_nemo.memory import require_targets
    from qarl_nemo.memory.lora import Adapters
    from qarl_nemo.train.lora import RANKS

    rank, targets = lora[0], check_targets(split_targets(lora[1]))
    require_targets(size, targets)
    if rank not in RANKS:
        raise ValueError(f"lora={rank} is a rank that no engine serves; legal: {', '.join(map(str, RANKS))}")
    _require_size("cache_gib", cache_gib)
    base = replace(base, recompute="full", logits=False)
    sizes = (gpu_gib * 2**30, cache_gib * 2**30)
    Console(width=160).print(lora_table(size, base, Adapters(rank, targets), *sizes, refusals))


def _require_size(name: str, gib: float) -> None:
    if not 0 < gib <= 2**20:
        raise ValueError(f"{name}={gib} must lie between 0 and {2**20}")


def _require_lora_options(context: typer.Context) -> None:
    learners = {"--gpus", "--layout", "--nested-in", "--optimizer", "--recompute", "--gradient-bytes", "--engine-tp"}
    wrong = sorted(learners.intersection(_given_options(context)))
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: of a Megatron learner on several GPUs; leave it out with --lora")


def _require_megatron_options(context: typer.Context, engine_tp: int | None, shared: dict[str, int]) -> None:
    if alone := [option for option in _given_options(context) if option in ("--lora-targets", "--cache-gib")]:
        raise ValueError(f"{', '.join(alone)}: of adapters on a frozen base; name their rank with --lora")
    if engine_tp is None:
        return
    uneven = [f"{count} {what}" for what, count in shared.items() if engine_tp < 1 or count % engine_tp]
    if uneven:
        raise ValueError(f"engine_tp={engine_tp} does not divide {' and '.join(uneven)}")


def _refusals(model: Path, learner: "Learner", engine_tp: int | None = None) -> list[str]:
    """Say why no kernel of vLLM takes the weights.

    What a whole weight lacks its parts lack, too, so that one GPU stands for any number.

    Raises:
        ValueError: the format cannot store the weights, or they are not served by the engine that was asked for.
    """
    from qarl_formats import VllmKernels
    from qarl_nemo.architecture import read_architecture
    from qarl_nemo.checkpoints.shapes import engine_problems

    assert learner.record is not None
    size, fmt = read_architecture(model, tuple(FAMILIES)), learner.record
    # Kernels that take any shape leave what storing takes.
    stored = replace(fmt, vllm=VllmKernels(fmt.vllm.experts, fmt.vllm.linear))
    if lines := [line for _, line in engine_problems(size, stored, learner.targets, 1)]:
        raise ValueError("\n  ".join([f"{fmt.name} cannot store these weights:", *lines]))
    lines = [line for _, line in engine_problems(size, fmt, learner.targets, engine_tp or 1)]
    if lines and engine_tp is not None:
        raise ValueError("\n  ".join(["no engine would start:", *(f"engine_tp={engine_tp}: {line}" for line in lines)]))
    return lines


def _require_own_format(model: Path, learner: "Learner") -> None:
    """Require that a quantized checkpoint, which is executed as it is stored, takes the bytes that are computed."""
    from qarl_nemo.checkpoints import open_checkpoint
    from qarl_nemo.checkpoints.scheme import stored_format
    from qarl_nemo.checkpoints.stored import Stored
    from qarl_nemo.files import read_json

    file = config_file(model)
    stored = stored_format(read_json(file, "a model's config.json").get("quantization_config") or {})
    if stored is None or learner.record is None:
        return
    options = []
    if stored.bits_per_weight != learner.record.bits_per_weight:
        size = f" --group-size {stored.group_size}" if stored.group_sizes else ""
        options.append(f"--format {stored.name}{size}")
    # A config.json alone does not say which layers these are.
    own = Stored.of(open_checkpoint(file.parent)) if any(file.parent.glob("*.safetensors")) else None
    if own and set(own.targets) != set(learner.targets):
        options.append(f"--targets {','.join(own.targets)}")
    if options:
        raise ValueError(
            f"{model} is stored as {stored.name}, as which a frozen base is executed: add {' '.join(options)}"
        )


def _given_options(context: typer.Context) -> list[str]:
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _require_no_options(context: typer.Context) -> None:
    given = _given_options(context)
    if given:
        raise ValueError(f"only --rollout has these options: {', '.join(given)}; name its model, or leave them out")
