"""`qarl doctor`: what this machine can run, and how fast it samples."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from qarl_nemo.cli.options import Targets, given_options, settings_of
from qarl_nemo.cli.program import command
from qarl_nemo.names import split_targets


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


def _require_no_options(context: typer.Context) -> None:
    given = given_options(context)
    if given:
        raise ValueError(f"only --rollout has these options: {', '.join(given)}; name its model, or leave them out")
