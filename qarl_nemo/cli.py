"""`qarl`: parse first, import torch after, so that help and config errors come at once."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qarl_kernels import QuantFormat
    from qarl_nemo.checkpoints import Checkpoint
    from qarl_nemo.local.config import LocalConfig

app = typer.Typer(
    name="qarl",
    help="Quantization-aware RL for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Format = Annotated[str, typer.Option("--format", help="w4a16, w4a8, fp8_block, fp8_channel or bf16.")]
_GroupSize = Annotated[int | None, typer.Option(help="Elements per scale along K (w4a16: 128, 64, 32).")]
_ScaleConvention = Annotated[str | None, typer.Option(help="narrow_range or full_range.")]
_Targets = Annotated[str, typer.Option(help="Comma-separated: experts, attention, mlp.")]
_MaxShardBytes = Annotated[int, typer.Option(help="Largest output file, which bounds the memory.")]
_Device = Annotated[str, typer.Option(help="Where quantization runs: cpu or cuda.")]
_Overwrite = Annotated[bool, typer.Option(help="Replace an earlier output of this command.")]


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
        _train_one(settings)
        run_dirs = [settings.run_dir]
    else:
        from qarl_nemo.local.arms import expand_arms, run_arms

        run_dirs = run_arms(expand_arms(settings, str(config)), parallel)
    _write_report(run_dirs, settings.run_dir)


def _train_one(settings: "LocalConfig") -> None:
    if settings.policy.megatron_cfg is None:
        from qarl_nemo.local.trainer import Trainer

        Trainer(settings).train()
    else:
        from qarl_nemo.megatron_training import train_with_megatron

        train_with_megatron(settings)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Hugging Face BF16 checkpoint directory.")],
    destination: Annotated[Path, typer.Argument(help="Where the quantized checkpoint goes.")],
    format_name: _Format = "w4a16",
    group_size: _GroupSize = None,
    scale_convention: _ScaleConvention = None,
    targets: _Targets = "experts",
    max_shard_bytes: _MaxShardBytes = 1 << 30,
    device: _Device = "cpu",
    overwrite: _Overwrite = False,
) -> None:
    """Write a quantized checkpoint that stock vLLM loads; streams shard by shard and resumes after a kill."""
    from qarl_kernels import get_format
    from qarl_nemo.checkpoints import open_checkpoint

    fmt = get_format(format_name, group_size=group_size, scale_convention=scale_convention)  # type: ignore[arg-type]
    _quantize(open_checkpoint(source), destination, fmt, targets, max_shard_bytes, overwrite, device)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Megatron torch_dist checkpoint directory, of any parallel layout.")],
    destination: Annotated[Path, typer.Argument(help="Where the Hugging Face checkpoint goes.")],
    hf_model: Annotated[Path, typer.Option(help="Directory with the model's config.json and tokenizer.")],
    format_name: _Format = "w4a16",
    group_size: _GroupSize = None,
    scale_convention: _ScaleConvention = None,
    targets: _Targets = "experts",
    max_shard_bytes: _MaxShardBytes = 1 << 30,
    device: _Device = "cpu",
    overwrite: _Overwrite = False,
    drop_vocab_padding: Annotated[
        bool, typer.Option(help="Leave out rows behind the vocabulary even if they are not zero.")
    ] = False,
) -> None:
    """Write a Megatron checkpoint as a quantized (or BF16) one that stock vLLM loads, without Megatron or a GPU.

    Streams, resumes after a kill, and unpickles nothing but torch's own table of contents.
    """
    from qarl_kernels import get_format
    from qarl_nemo.checkpoints import open_megatron

    fmt = get_format(format_name, group_size=group_size, scale_convention=scale_convention)  # type: ignore[arg-type]
    checkpoint = open_megatron(source, hf_model, drop_vocab_padding=drop_vocab_padding)
    _quantize(checkpoint, destination, fmt, targets, max_shard_bytes, overwrite, device)


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
    attention: Annotated[str, typer.Option(help="The learner's kernel: torch, or engine, vLLM's own.")] = "torch",
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
    parallel: Annotated[int, typer.Option(help="vLLM engines at a time, which divide that share.")] = 1,
    layers: Annotated[bool, typer.Option(help="Compare operator by operator as well, on vLLM's own inputs.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of compare.json and compare.png.")] = Path("runs/compare"),
    record: Annotated[Path | None, typer.Option(help="File of docs/results that takes the gaps.")] = None,
    record_operators: Annotated[Path | None, typer.Option(help="The same for --layers.")] = None,
) -> None:
    """Measure how far learner and rollout engine are apart: |logprob gap|, k3 KL, sequence ratios, top-1 agreement.

    The engine answers the prompts at temperature 1 and greedily; the learner scores the same tokens. Arms: aligned (the
    learner executes the format that the engine serves), rollout_only (BF16 learner), and bf16 (both, the floor). Beside
    them attention, the learner against itself with another attention kernel: the format's own floor; and engine, which
    reads its own responses.
    """
    from rich.console import Console

    from qarl_nemo.local.compare.output import comparison_tables, operator_tables, write_comparison
    from qarl_nemo.local.compare.record import append_comparison
    from qarl_nemo.local.compare.run import compare as measure
    from qarl_nemo.local.compare.settings import CompareSettings

    settings = CompareSettings(
        checkpoint=checkpoint,
        formats=tuple(formats or ["w4a16"]),
        group_size=group_size,
        targets=tuple(target.strip() for target in targets.split(",")),
        engine=engine,
        device=device,
        precision=precision,
        attention=attention,
        prompts=prompts,
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        num_responses=num_responses,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        gpu_memory_utilization=gpu_memory_utilization,
        parallel=parallel,
        layers=layers,
    )
    result = measure(settings, typer.echo)
    Console().print(*comparison_tables(result), *operator_tables(result))
    written = [*write_comparison(output, settings, result)]
    written += append_comparison(settings, result, record, record_operators)
    typer.echo("written: " + ", ".join(map(str, written)))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or log folders of NeMo-RL; several are compared.")
    ],
    output: Annotated[Path | None, typer.Option(help="HTML file; default <first run>/report.html.")] = None,
) -> None:
    """Write an HTML report: reward, KL, entropy, ratios by sign, bands, scatter, error tokens, timings."""
    from qarl_nemo.metrics.report import write_report

    path = write_report(runs, output or runs[0] / "report.html")
    typer.echo(f"report: {path}")


@app.command()
def doctor(
    context: typer.Context,
    rollout: Annotated[
        Path | None,
        typer.Option(
            help="Measure vLLM on this machine instead, with dummy weights, in every format: a Hugging Face Qwen3, "
            "Qwen3-MoE or Qwen2 folder, or its config.json. The options below are for this."
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
    repeats: Annotated[int, typer.Option(help="Measurements of each figure; the median counts.")] = 5,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    enable_expert_parallel: Annotated[bool, typer.Option(help="Whole experts on each GPU, not slices.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU that vLLM takes.")] = 0.9,
    output: Annotated[
        Path, typer.Option(help="Folder of the results; the same command goes on from what it holds.")
    ] = Path("runs/rollout_speed"),
    record: Annotated[Path | None, typer.Option(help="JSON file of figures to add to (docs/results).")] = None,
) -> None:
    """Say what this machine can run, and why not; or, with --rollout, how fast it samples and in which format best."""
    from qarl_nemo.doctor import measure_rollouts, show_findings

    if rollout is None:
        _require_no_options(context)
        show_findings()
        return
    from qarl_nemo.local.speed.settings import ALL_FORMATS, RolloutSpeedSettings

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


@app.command()
def memory(
    model: Annotated[Path, typer.Argument(help="Hugging Face Qwen3, Qwen3-MoE or Qwen2 folder, or its config.json.")],
    gpus: Annotated[int, typer.Option(help="GPUs that share the model.")] = 8,
    gpu_gib: Annotated[float, typer.Option(help="Memory of each, in GiB: 79 of an H100, 139 of an H200.")] = 79.0,
    layout: Annotated[list[str] | None, typer.Option(help="E.g. tp2_ep8; repeat. Default: several.")] = None,
    format_name: _Format = "w4a16",
    group_size: _GroupSize = None,
    targets: _Targets = "experts",
    keep_operand: Annotated[bool, typer.Option(help="Keep what the learner's GEMMs multiply.")] = False,
    tokens: Annotated[int, typer.Option(help="Of a microbatch, before tp and cp ranks share it.")] = 8192,
    optimizer: Annotated[list[str] | None, typer.Option(help="adam, adam_bf16, muon or offloaded; repeat.")] = None,
    recompute: Annotated[list[str] | None, typer.Option(help="full or none; repeat.")] = None,
    gradient_bytes: Annotated[int, typer.Option(help="Of a gradient: 4 or 2.")] = 4,
    engine_tp: Annotated[
        int | None, typer.Option(help="GPUs of one rollout engine on the learner's GPUs: adds a refit's peaks.")
    ] = None,
) -> None:
    """Compute what a Megatron learner needs on each GPU, and say what fits; nothing is started."""
    from rich.console import Console

    from qarl_nemo.memory import OPTIMIZERS, Learner, ModelSize, Parallelism, layouts, memory_table

    size = ModelSize.read(model)
    ranks = [Parallelism.parse(text, gpus) for text in layout or ()] or layouts(size, gpus)
    attention, group = "attention" in targets.split(","), group_size or 128
    learners = [
        Learner(format_name, group, attention, keep_operand, name, gradient_bytes, tokens, kind)
        for name in optimizer or OPTIMIZERS
        for kind in recompute or ("full", "none")
    ]
    Console(width=150).print(memory_table(size, ranks, learners, gpu_gib * 2**30, engine_tp))


def _require_no_options(context: typer.Context) -> None:
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    given = [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise ValueError(f"only --rollout has these options: {', '.join(given)}; name its model, or leave them out")


def _quantize(
    checkpoint: "Checkpoint",
    destination: Path,
    fmt: "QuantFormat",
    targets: str,
    max_shard_bytes: int,
    overwrite: bool,
    device: str,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from qarl_nemo.checkpoints import QuantizeProgress, quantize_checkpoint

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
            checkpoint,
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
