"""`qarl export`."""

from pathlib import Path
from typing import Annotated

import typer

from qarl_nemo.cli.options import Overwrite
from qarl_nemo.cli.program import command


@command
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run of qarl train with LoRA or a quantized base.")],
    destination: Annotated[Path, typer.Argument(help="Where the BF16 checkpoint goes.")],
    dequantize: Annotated[
        bool, typer.Option(help="Of a quantized base, write the BF16 numbers that were executed.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Merge what a run trained into its frozen base: one BF16 checkpoint, streamed; a killed export goes on."""
    from qarl_nemo.cli.shard_progress import shard_progress
    from qarl_nemo.files import readable_bytes
    from qarl_nemo.train.export import export_run

    with shard_progress() as show:
        report = export_run(run, destination, dequantize=dequantize, overwrite=overwrite, progress=show)
    typer.echo(f"{report.destination}: {len(report.rows)} tensors in BF16, {readable_bytes(report.output_bytes)}")
    typer.echo(f"serve it: vllm serve {report.destination}")
