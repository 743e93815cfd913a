"""`qarl compare`."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qarl_formats import DEFAULT_FORMAT, find_format
from qarl_nemo.cli import compare_options as options
from qarl_nemo.cli.options import (
    NestedIn,
    OwnWidth,
    ScaleConvention,
    Targets,
    given_options,
    require_own_width,
    settings_of,
)
from qarl_nemo.cli.program import command
from qarl_nemo.config.problems import attempt
from qarl_nemo.names import split_targets

if TYPE_CHECKING:
    from qarl_nemo.measure.compare.run import Comparison
    from qarl_nemo.measure.compare.settings import CompareSettings


@command
def compare(
    context: typer.Context,
    checkpoint: options.Checkpoint,
    formats: options.Formats = None,
    group_size: options.GroupSize = None,
    scale_convention: ScaleConvention = None,
    nested_in: NestedIn = None,
    own_width: OwnWidth = False,
    targets: Targets = "experts",
    engine: options.Engine = "packed",
    device: options.Device = "auto",
    precision: options.Precision = "bfloat16",
    attention: options.Attention = "torch",
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    prompt_tokens: options.PromptTokens = 32,
    num_responses: options.NumResponses = 4,
    max_new_tokens: options.MaxNewTokens = 64,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 16,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.8,
    parallel: options.Parallel = 1,
    adapter: options.Adapter = None,
    layers: options.Layers = False,
    output: options.Output = Path("runs/compare"),
    record: options.Record = None,
    record_operators: options.RecordOperators = None,
) -> None:
    """Measure how far the learner's log-probabilities are from the rollout engine's, format by format.

    The engine answers the prompts at temperature 1 and greedily, and the learner scores the same tokens: in the format
    that the engine serves (aligned), in BF16 (rollout_only), and with BF16 on both sides (bf16, the floor). Beside
    these, attention compares two attention kernels of the learner, the format's own floor, and engine what the engine
    wrote with what it reads.
    """
    given = locals()
    from qarl_nemo.measure.compare.output import write_comparison
    from qarl_nemo.measure.compare.record import append_comparison
    from qarl_nemo.measure.compare.run import compare as measure
    from qarl_nemo.measure.compare.settings import CompareSettings

    chosen = tuple(formats or [DEFAULT_FORMAT])
    settings = settings_of(CompareSettings, given, formats=chosen, targets=tuple(split_targets(targets)))
    problems = _idle_options(context, settings) + _place_problems(checkpoint, output, record, record_operators)
    if all(map(find_format, chosen)):
        attempt(problems, require_own_width, own_width, chosen)
    result = measure(settings, typer.echo, problems)
    _show(result)
    written = [*write_comparison(output, settings, result)]
    written += append_comparison(settings, result, record, record_operators)
    typer.echo("written: " + ", ".join(map(str, written)))


def _show(result: "Comparison") -> None:
    from rich.console import Console

    from qarl_nemo.measure.compare.output import comparison_tables, legend, operator_tables

    Console().print(*comparison_tables(result), *legend(result), *operator_tables(result), sep="\n")


def _idle_options(context: typer.Context, settings: "CompareSettings") -> list[str]:
    given = given_options(context)
    problems = []
    if settings.prompts and "--prompt-tokens" in given:
        problems.append("--prompt-tokens is the length of random prompts, and --prompts names others; leave one out")
    if settings.engine == "packed" and "--gpu-memory-utilization" in given:
        problems.append("--gpu-memory-utilization is vLLM's share; leave it out, or set --engine vllm")
    if settings.engine == "packed" and "--parallel" in given:
        problems.append("--parallel starts vLLM engines beside each other; leave it out, or set --engine vllm")
    if not settings.layers and "--record-operators" in given:
        problems.append("--record-operators records what --layers measures; add --layers, or leave it out")
    return problems


def _place_problems(checkpoint: Path, output: Path, *records: Path | None) -> list[str]:
    """Find places that cannot be written to before anything is measured."""
    from qarl_nemo.files import require_writable
    from qarl_nemo.measure.compare.record import require_rows_of

    problems = []
    if output.is_file():
        problems.append(f"--output {output} is a file; name a folder")
    else:
        attempt(problems, require_writable, output)
    for path in filter(None, records):
        attempt(problems, require_rows_of, checkpoint, path)
    return problems
