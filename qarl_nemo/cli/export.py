"""`qarl export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qarl_nemo.cli.options import Overwrite
from qarl_nemo.cli.program import command

if TYPE_CHECKING:
    from qarl_nemo.checkpoints import QuantizeProgress


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
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from qarl_nemo.files import readable_bytes
    from qarl_nemo.train.export import export_run

    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn()) as bar:
        task = bar.add_task("merging", total=None, visible=False)

        def show(event: "QuantizeProgress") -> None:
            text = f"shard {event.shard}/{event.num_shards}"
            bar.update(task, completed=event.done_bytes, total=event.total_bytes, description=text, visible=True)

        report = export_run(run, destination, dequantize=dequantize, overwrite=overwrite, progress=show)
    typer.echo(f"{report.destination}: {len(report.rows)} tensors in BF16, {readable_bytes(report.output_bytes)}")
    typer.echo(f"serve it: vllm serve {report.destination}")
