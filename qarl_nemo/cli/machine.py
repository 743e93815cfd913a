"""`qarl doctor` and `qarl memory`: what a machine can run."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from qarl_formats import DEFAULT_FORMAT, formats_with_groups
from qarl_nemo.cli.options import Format, GroupSize, Targets
from qarl_nemo.cli.program import command


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
    targets: Annotated[str, typer.Option(help="Comma-separated: experts, attention, mlp.")] = "experts",
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
    """Say what this machine can run and what is missing; with --rollout, how fast it samples in every format."""
    from qarl_nemo.measure.doctor import measure_rollouts, show_findings

    if rollout is None:
        _require_no_options(context)
        show_findings()
        return
    from qarl_nemo.measure.speed.settings import ALL_FORMATS, RolloutSpeedSettings

    settings = RolloutSpeedSettings(
        model=rollout,
        formats=tuple(formats or ALL_FORMATS),
        group_size=group_size,
        targets=tuple(target.strip() for target in targets.split(",")),
        batch_sizes=tuple(batch_sizes or (32, 128, 512)),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    measure_rollouts(settings, output, record, command=f"qarl {shlex.join(sys.argv[1:])}")


@command
def memory(
    model: Annotated[Path, typer.Argument(help="Hugging Face Qwen3, Qwen3-MoE or Qwen2 folder, or its config.json.")],
    gpus: Annotated[int, typer.Option(help="GPUs that share the model.")] = 8,
    gpu_gib: Annotated[float, typer.Option(help="Memory of each, in GiB: 79 for an H100, 139 for an H200.")] = 79.0,
    layout: Annotated[list[str] | None, typer.Option(help="E.g. tp2_ep8; repeat. Default: several.")] = None,
    format_name: Format = DEFAULT_FORMAT,
    group_size: GroupSize = None,
    targets: Targets = "experts",
    keep_operand: Annotated[bool, typer.Option(help="Keep what the learner's GEMMs multiply.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of a microbatch, before tp and cp ranks share it.")] = 8192,
    optimizer: Annotated[list[str] | None, typer.Option(help="adam, adam_bf16, muon or offloaded; repeat.")] = None,
    recompute: Annotated[list[str] | None, typer.Option(help="full or none; repeat.")] = None,
    gradient_bytes: Annotated[int, typer.Option(help="Bytes of one gradient element: 4 or 2.")] = 4,
    logprob_chunk: Annotated[
        int | None, typer.Option(help="Tokens whose log-probabilities are computed at a time. Default: all.")
    ] = None,
    engine_tp: Annotated[
        int | None, typer.Option(help="GPUs of one rollout engine on the learner's GPUs: adds a refit's peaks.")
    ] = None,
) -> None:
    """Compute what a Megatron learner needs on each GPU, and say what fits; nothing is started."""
    from rich.console import Console

    from qarl_nemo.cli.memory_table import memory_table
    from qarl_nemo.memory import (
        OPTIMIZERS,
        Learner,
        ModelSize,
        Parallelism,
        layouts,
        require_layout,
        require_targets,
    )
    from qarl_nemo.names import check_targets

    size = ModelSize.read(model)
    chosen = check_targets([target.strip() for target in targets.split(",")])
    require_targets(size, chosen)
    ranks = [Parallelism.parse(text, gpus) for text in layout or ()] or layouts(size, gpus)
    for one in ranks:
        require_layout(size, one)
    if group_size is not None and format_name not in (grouped := formats_with_groups()):
        raise ValueError(f"format {format_name!r} takes no group_size; {' and '.join(grouped)} have one: remove it")
    if not 0 < gpu_gib <= 2**20:
        raise ValueError(f"gpu_gib={gpu_gib} must lie between 0 and {2**20}")
    if engine_tp is not None and (engine_tp < 1 or gpus % engine_tp):
        raise ValueError(f"engine_tp={engine_tp} does not divide {gpus} GPUs")
    learners = [
        Learner(
            format_name,
            group_size or 128,
            "attention" in chosen,
            keep_operand,
            name,
            gradient_bytes,
            tokens,
            kind,
            logprob_chunk=logprob_chunk,
        )
        for name in optimizer or OPTIMIZERS
        for kind in recompute or ("full", "none")
    ]
    Console(width=160).print(memory_table(size, ranks, learners, gpu_gib * 2**30, engine_tp))


def _require_no_options(context: typer.Context) -> None:
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    given = [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise ValueError(f"only --rollout has these options: {', '.join(given)}; name its model, or leave them out")
