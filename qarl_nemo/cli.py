"""`qarl`: parse first, import torch after, so that help and config errors come at once."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="qarl",
    help="Quantization-aware RL for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML with the whole run, e.g. examples/configs/local_demo.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, a.b=c.")] = None,
    parallel: Annotated[int, typer.Option(help="Runs at a time, for configs with a compare: block.")] = 2,
) -> None:
    """Train with QaRL in one process; a killed run resumes from its last checkpoint.

    A config with a `compare:` block runs every arm with every seed and writes one report over all.
    """
    from qarl_nemo.config import load_config
    from qarl_nemo.local.config import LocalConfig

    settings = load_config(config, overrides or [], LocalConfig)
    if settings.compare is None:
        from qarl_nemo.local.trainer import Trainer

        Trainer(settings).train()
        run_dirs = [settings.run_dir]
    else:
        from qarl_nemo.local.arms import expand_arms, run_arms

        run_dirs = run_arms(expand_arms(settings, str(config)), parallel)
    _write_report(run_dirs, settings.run_dir)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Hugging Face BF16 checkpoint directory.")],
    destination: Annotated[Path, typer.Argument(help="Where the quantized checkpoint goes.")],
    format_name: Annotated[
        str, typer.Option("--format", help="w4a16, w4a8, fp8_block, fp8_channel or bf16.")
    ] = "w4a16",
    group_size: Annotated[int | None, typer.Option(help="Elements per scale along K (w4a16: 128, 64, 32).")] = None,
    scale_convention: Annotated[str | None, typer.Option(help="narrow_range or full_range.")] = None,
    targets: Annotated[str, typer.Option(help="Comma-separated: experts, attention, mlp.")] = "experts",
    max_shard_bytes: Annotated[int, typer.Option(help="Largest output file, which bounds the memory.")] = 1 << 30,
    device: Annotated[str, typer.Option(help="Where quantization runs: cpu or cuda.")] = "cpu",
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier output of this command.")] = False,
) -> None:
    """Write a quantized checkpoint that stock vLLM loads; streams shard by shard and resumes after a kill."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from qarl_kernels import get_format
    from qarl_nemo.checkpoints import QuantizeProgress, quantize_checkpoint

    fmt = get_format(format_name, group_size=group_size, scale_convention=scale_convention)  # type: ignore[arg-type]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("quantizing", total=None, visible=False)

        def show(event: QuantizeProgress) -> None:
            text = f"shard {event.shard}/{event.num_shards}"
            bar.update(task, completed=event.done_bytes, total=event.total_bytes, description=text, visible=True)

        report = quantize_checkpoint(
            source,
            destination,
            fmt,
            [target.strip() for target in targets.split(",")],
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
            device=device,
            progress=show,
        )
    quantized = sum(row["quantized"] for row in report.rows)
    Console().print(
        f"{report.destination}: {quantized} of {len(report.rows)} tensors quantized to {fmt.name}, "
        f"{report.source_bytes / 1e9:.2f} GB -> {report.output_bytes / 1e9:.2f} GB "
        f"({report.output_bytes / report.source_bytes:.2f}x); table in qarl_quantization.json"
    )


@app.command()
def compare(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face Qwen3 or Qwen3-MoE directory, not quantized.")],
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="What the engine serves; repeat for several. Default w4a16.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Elements per scale along K, of integer formats.")] = None,
    targets: Annotated[str, typer.Option(help="Comma-separated: experts, attention, mlp.")] = "experts",
    engine: Annotated[
        str, typer.Option(help="packed (built in, any machine) or vllm (in its own process).")
    ] = "packed",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="bfloat16, or float32 with the packed engine.")] = "bfloat16",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text, one prompt a line, or JSONL with prompt_token_ids, prompt or problem; else random."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Random prompts (16), or the first ones of the file.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of a random prompt.")] = 32,
    num_responses: Annotated[int, typer.Option(help="Sampled responses of each prompt; one more is greedy.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Longest response, tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Of random prompts and of sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Responses of one forward.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU that vLLM takes.")] = 0.8,
    output: Annotated[Path, typer.Option(help="Folder of compare.json and compare.png.")] = Path("runs/compare"),
) -> None:
    """Measure how far learner and rollout engine are apart: |logprob gap|, k3 KL, sequence ratios, top-1 agreement.

    The engine answers the prompts at temperature 1 and greedily; the learner scores the same tokens. Arms: aligned (the
    learner executes the format that the engine serves), rollout_only (BF16 learner), and bf16 (both, the floor).
    """
    from rich.console import Console

    from qarl_nemo.local.compare import compare as measure
    from qarl_nemo.local.compare_output import comparison_tables, write_comparison
    from qarl_nemo.local.compare_settings import CompareSettings

    settings = CompareSettings(
        checkpoint=checkpoint,
        formats=tuple(formats or ["w4a16"]),
        group_size=group_size,
        targets=tuple(target.strip() for target in targets.split(",")),
        engine=engine,
        device=device,
        precision=precision,
        prompts=prompts,
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        num_responses=num_responses,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    result = measure(settings, typer.echo)
    Console().print(*comparison_tables(result))
    typer.echo("written: " + ", ".join(map(str, write_comparison(output, settings, result))))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are compared.")],
    output: Annotated[Path | None, typer.Option(help="HTML file; default <first run>/report.html.")] = None,
) -> None:
    """Write an HTML report: reward, KL, entropy, ratios by sign, bands, scatter, error tokens, timings."""
    from qarl_nemo.metrics.report import write_report

    path = write_report(runs, output or runs[0] / "report.html")
    typer.echo(f"report: {path}")


@app.command()
def doctor() -> None:
    """Say what this machine can run, and why not."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from qarl_nemo.doctor import examine

    table = Table("capability", "here", "why / how")
    for finding in examine():
        table.add_row(finding.capability, "[green]yes[/]" if finding.usable else "[red]no[/]", escape(finding.reason))
    Console().print(table)


def _write_report(run_dirs: list[Path], folder: Path) -> None:
    from qarl_nemo.metrics.report import write_report, write_summary_figure

    write_summary_figure(run_dirs, folder / "summary.png")
    typer.echo(f"report: {write_report(run_dirs, folder / 'report.html')}")


def main() -> None:
    """Run the command line; what a user can cause is printed as one message, without a traceback."""
    try:
        app()
    except (ValueError, RuntimeError, ImportError) as error:
        typer.secho(f"qarl: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
