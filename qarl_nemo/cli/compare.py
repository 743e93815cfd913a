"""`qarl compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from qarl_formats import DEFAULT_FORMAT, find_format
from qarl_nemo.cli.options import NestedIn, OwnWidth, ScaleConvention, Targets, require_own_width, settings_of
from qarl_nemo.cli.program import command
from qarl_nemo.names import split_targets


def _maintainers(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="For maintainers")


@command
def compare(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face Qwen, Llama or Mistral directory, not quantized.")],
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help=f"What the engine serves; repeat for several. Default {DEFAULT_FORMAT}."),
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Elements per scale along K, of integer formats.")] = None,
    scale_convention: ScaleConvention = None,
    nested_in: NestedIn = None,
    own_width: OwnWidth = False,
    targets: Targets = "experts",
    engine: Annotated[str, typer.Option(help="packed (built in, any machine) or vllm (own process).")] = "packed",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="bfloat16, or float32 with the packed engine.")] = "bfloat16",
    attention: Annotated[
        str,
        typer.Option(help="The learner's kernel: torch's, or vLLM's own (engine, on Hopper), to leave it out of gaps."),
    ] = "torch",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text, one prompt a line, or JSONL with prompt_token_ids, prompt or problem; else random."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Random prompts (16), or the first ones of the file.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of a random prompt.")] = 32,
    num_responses: Annotated[int, typer.Option(help="Sampled responses of each prompt; one more is greedy.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Longest response, tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of random prompts and of sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Responses in one forward.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU that vLLM takes.")] = 0.8,
    parallel: Annotated[int, typer.Option(help="vLLM engines that run at a time and divide that share.")] = 1,
    adapter: Annotated[
        Path | None, typer.Option(help="PEFT folder of adapters that both sides add, as a run's checkpoints hold them.")
    ] = None,
    layers: Annotated[bool, typer.Option(help="Compare operator by operator as well, on vLLM's own inputs.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of compare.json and compare.png.")] = Path("runs/compare"),
    record: Annotated[Path | None, _maintainers("Results file (docs/results) to add the gaps to.")] = None,
    record_operators: Annotated[Path | None, _maintainers("The same for --layers.")] = None,
) -> None:
    """Measure how far the learner's log-probabilities are from the rollout engine's, format by format.

    The engine answers the prompts at temperature 1 and greedily, and the learner scores the same tokens: in the format
    that the engine serves (aligned), in BF16 (rollout_only), and with BF16 on both sides (bf16, the floor). Beside
    these, attention compares two attention kernels of the learner, the format's own floor, and engine what the engine
    wrote with what it reads.
    """
    given = locals()
    from rich.console import Console

    from qarl_nemo.measure.compare.output import comparison_tables, legend, operator_tables, write_comparison
    from qarl_nemo.measure.compare.record import append_comparison
    from qarl_nemo.measure.compare.run import compare as measure
    from qarl_nemo.measure.compare.settings import CompareSettings

    chosen = tuple(formats or [DEFAULT_FORMAT])
    settings = settings_of(CompareSettings, given, formats=chosen, targets=tuple(split_targets(targets)))
    if all(map(find_format, chosen)):
        require_own_width(own_width, chosen)
    _require_places(output, record, record_operators, layers=settings.layers)
    result = measure(settings, typer.echo)
    Console().print(*comparison_tables(result), *legend(result), *operator_tables(result), sep="\n")
    written = [*write_comparison(output, settings, result)]
    written += append_comparison(settings, result, record, record_operators)
    typer.echo("written: " + ", ".join(map(str, written)))


def _require_places(output: Path, record: Path | None, record_operators: Path | None, *, layers: bool) -> None:
    """Refuse places that cannot be written to before anything is measured; all are listed."""
    from qarl_nemo.files import FileError
    from qarl_nemo.metrics.results import read_results

    problems = []
    if record_operators is not None and not layers:
        problems.append("--record-operators records what --layers measures; add --layers, or leave it out")
    if output.exists() and not output.is_dir():
        problems.append(f"--output {output} is a file; name a folder")
    for path in (record, record_operators):
        if path is not None and path.exists():
            try:
                read_results(path)
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise FileError("\n  ".join([f"{len(problems)} problem(s) with the places of the results:", *problems]))
