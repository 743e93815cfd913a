"""`qarl quantize` and `qarl convert`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qarl_formats import DEFAULT_FORMAT, get_format
from qarl_nemo.cli.options import (
    Device,
    Format,
    GroupSize,
    MaxShardBytes,
    NestedIn,
    Overwrite,
    OwnWidth,
    ScaleConvention,
    Targets,
    require_own_width,
)
from qarl_nemo.cli.program import command
from qarl_nemo.config.problems import attempt
from qarl_nemo.names import check_targets, split_targets, summarize_names

if TYPE_CHECKING:
    from qarl_kernels import QuantFormat
    from qarl_nemo.checkpoints import Checkpoint

# The files with the words of a tokenizer, of which a folder has one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@command
def quantize(
    source: Annotated[Path, typer.Argument(help="Hugging Face BF16 checkpoint directory.")],
    destination: Annotated[Path, typer.Argument(help="Where the quantized checkpoint goes.")],
    format_name: Format = DEFAULT_FORMAT,
    group_size: GroupSize = None,
    scale_convention: ScaleConvention = None,
    nested_in: NestedIn = None,
    own_width: OwnWidth = False,
    targets: Targets = "experts",
    max_shard_bytes: MaxShardBytes = 1 << 30,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    split_channels: Annotated[
        float | None,
        typer.Option(help="Least share of an MLP's inner channels to compute twice, for smaller scales of down_proj."),
    ] = None,
) -> None:
    """Quantize a Hugging Face checkpoint into one that stock vLLM loads; the same command resumes a killed one."""
    from qarl_nemo.checkpoints import open_checkpoint

    problems: list[str] = []
    fmt = attempt(problems, _format, format_name, group_size, scale_convention, nested_in, own_width)
    checkpoint = attempt(problems, open_checkpoint, source)
    _require_options(problems, checkpoint, destination, targets, max_shard_bytes, device)
    _quantize(checkpoint, destination, fmt, targets, max_shard_bytes, overwrite, device, split_channels)


@command
def convert(
    source: Annotated[Path, typer.Argument(help="Megatron torch_dist checkpoint directory, of any parallel layout.")],
    destination: Annotated[Path, typer.Argument(help="Where the Hugging Face checkpoint goes.")],
    hf_model: Annotated[Path, typer.Option(help="Directory with the model's config.json and tokenizer.")],
    format_name: Format = DEFAULT_FORMAT,
    group_size: GroupSize = None,
    scale_convention: ScaleConvention = None,
    nested_in: NestedIn = None,
    own_width: OwnWidth = False,
    targets: Targets = "experts",
    max_shard_bytes: MaxShardBytes = 1 << 30,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    drop_vocab_padding: Annotated[
        bool, typer.Option(help="Leave out rows beyond the vocabulary even if they are not zero.")
    ] = False,
) -> None:
    """Turn a Megatron checkpoint, as NeMo-RL saves it, into one that stock vLLM loads: quantized, or BF16.

    It needs neither Megatron nor a GPU, and unpickles nothing that could run code. The same command resumes a killed
    one.
    """
    from qarl_nemo.checkpoints import open_megatron

    problems: list[str] = []
    fmt = attempt(problems, _format, format_name, group_size, scale_convention, nested_in, own_width)
    checkpoint = attempt(problems, open_megatron, source, hf_model, drop_vocab_padding=drop_vocab_padding)
    _require_options(problems, checkpoint, destination, targets, max_shard_bytes, device)
    _quantize(checkpoint, destination, fmt, targets, max_shard_bytes, overwrite, device)


def _format(
    name: str, group_size: int | None, scale_convention: str | None, nested_in: str | None, own_width: bool
) -> "QuantFormat":
    options = {"group_size": group_size, "scale_convention": scale_convention, "nested_in": nested_in}
    fmt = get_format(name, **options, own_width=own_width)  # type: ignore[arg-type]
    require_own_width(own_width, [name])
    return fmt


def _require_options(
    problems: list[str],
    checkpoint: "Checkpoint | None",
    destination: Path,
    targets: str,
    max_shard_bytes: int,
    device: str,
) -> None:
    """Refuse what is wrong without a look at the weights; all is listed with what was wrong before."""
    from qarl_nemo.checkpoints.partial import require_place
    from qarl_nemo.checkpoints.quantize import check_apart, require_device

    for folder in {checkpoint.folder, checkpoint.companions} if checkpoint else ():
        attempt(problems, check_apart, folder, destination)
    attempt(problems, require_place, destination)
    attempt(problems, check_targets, split_targets(targets))
    if max_shard_bytes < 1:
        problems.append(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    attempt(problems, require_device, device)
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} problem(s), nothing was written:", *problems]))


def _quantize(
    checkpoint: "Checkpoint | None",
    destination: Path,
    fmt: "QuantFormat | None",
    targets: str,
    max_shard_bytes: int,
    overwrite: bool,
    device: str,
    split_channels: float | None = None,
) -> None:
    from qarl_nemo.checkpoints import quantize_checkpoint
    from qarl_nemo.cli.shard_progress import shard_progress
    from qarl_nemo.files import readable_bytes
    from qarl_nemo.refit.engine_settings import serve_command

    assert checkpoint
    assert fmt
    chosen = split_targets(targets)
    with shard_progress() as show:
        report = quantize_checkpoint(
            checkpoint,
            destination,
            fmt,
            chosen,
            max_shard_bytes=max_shard_bytes,
            split_channels=split_channels,
            overwrite=overwrite,
            device=device,
            progress=show,
        )
    plan = report.plan
    for reason in dict.fromkeys(plan.dropped.values()):
        dropped = [name for name, why in plan.dropped.items() if why == reason]
        typer.echo(f"left out: {summarize_names(dropped, 8)} ({reason})")
    for target, (before, after) in plan.splitting.widths.items() if plan.splitting else ():
        typer.echo(f"split channels of {target}: {before} -> {after}")
    tensors = [tensor.quantized for tensor in plan.tensors]
    again = f", {report.num_resumed_shards} of {len(plan.shards)} shards from before" * bool(report.num_resumed_shards)
    typer.echo(
        f"{report.destination}: {sum(tensors)} of {len(tensors)} tensors quantized to {fmt.name}, "
        f"{readable_bytes(plan.source_bytes)} -> {readable_bytes(plan.num_bytes)} "
        f"({plan.num_bytes / plan.source_bytes:.2f}x){again}; table in qarl_quantization.json"
    )
    typer.echo(f"serve it: {serve_command(report.destination, fmt, chosen)}")
    if not any((report.destination / name).exists() for name in _TOKENIZERS):
        typer.echo("the source has no tokenizer: copy one there first")
