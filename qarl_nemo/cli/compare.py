"""`qarl compare`."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qarl_formats import DEFAULT_FORMAT, find_format
from qarl_nemo.cli import compare_options as options
from qarl_nemo.cli.options import NestedIn, OwnWidth, ScaleConvention, Targets, require_own_width, settings_of
from qarl_nemo.cli.program import command
from qarl_nemo.names import split_targets

if TYPE_CHECKING:
    from qarl_nemo.measure.compare.run import Comparison


@command
def compare(
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
    if all(map(find_format, chosen)):
        require_own_width(own_width, chosen)
    _require_places(output, record, record_operators, layers=settings.layers)
    result = measure(settings, typer.echo)
    _show(result)
    written = [*write_comparison(output, settings, result)]
    written += append_comparison(settings, result, record, record_operators)
    typer.echo("written: " + ", ".join(map(str, written)))


def _show(result: "Comparison") -> None:
    from rich.console import Console

    from qarl_nemo.measure.compare.output import comparison_tables, legend, operator_tables

    Console().print(*comparison_tables(result), *legend(result), *operator_tables(result), sep="\n")


def _require_places(output: Path, record: Path | None, record_operators: Path | None, *, layers: bool) -> None:
    """Refuse places that cannot be written to before anything is measured; all are listed."""
    from qarl_nemo.files import FileError, make_folder
    from qarl_nemo.metrics.results import read_results

    problems = []
    if record_operators is not None and not layers:
        problems.append("--record-operators records what --layers measures; add --layers, or leave it out")
    if output.exists() and not output.is_dir():
        problems.append(f"--output {output} is a file; name a folder")
    else:
        try:
            make_folder(output, "a folder for the comparison")
        except FileError as error:
            problems.append(f"--output {error}")
    for path in (record, record_operators):
        if path is not None and path.exists():
            try:
                read_results(path)
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise FileError("\n  ".join([f"{len(problems)} problem(s) with the places of the results:", *problems]))
