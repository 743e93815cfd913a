"""`qarl export`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from qarl_nemo.cli.options import FrozenBase, Overwrite
from qarl_nemo.cli.program import command


@command
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run of qarl train with LoRA or a quantized base.")],
    destination: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    dequantize: Annotated[
        bool, typer.Option(help="Of a quantized base, write the BF16 numbers that were executed.")
    ] = False,
    packed: Annotated[
        bool,
        typer.Option(help="Of a quantized base, write what was served: it stays packed, adapters stay in the run."),
    ] = False,
    base: FrozenBase = None,
    overwrite: Overwrite = False,
) -> None:
    """Make one checkpoint of a run with LoRA or a quantized base: merged in BF16, or packed as it was served."""
    if dequantize and packed:
        raise ValueError("--dequantize writes BF16 and --packed what is quantized: leave one of them out")
    from qarl_nemo.checkpoints.partial import require_place
    from qarl_nemo.cli.shard_progress import shard_progress
    from qarl_nemo.files import readable_bytes
    from qarl_nemo.train.export import export_run
    from qarl_nemo.train.export_packed import export_packed

    require_place(destination)
    if packed:
        with shard_progress() as show:
            served = export_packed(run, destination, overwrite=overwrite, progress=show, base_folder=base)
        typer.echo(f"{destination}: packed as it was served\nserve it: {served}")
        if "--lora-modules" in served:
            typer.echo(
                "its adapters stay in the run, in the folder that this command names: keep both, and copy it "
                "before the run goes on, which deletes its older checkpoints"
            )
        return
    with shard_progress() as show:
        report = export_run(
            run, destination, dequantize=dequantize, overwrite=overwrite, progress=show, base_folder=base
        )
    typer.echo(f"{report.destination}: {len(report.rows)} tensors in BF16, {readable_bytes(report.plan.num_bytes)}")
    typer.echo(f"serve it: vllm serve {shlex.quote(str(report.destination))}")
