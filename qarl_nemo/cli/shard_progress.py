"""The bar of the commands that write checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from qarl_nemo.checkpoints import QuantizeProgress


@contextmanager
def shard_progress() -> Iterator[Callable[["QuantizeProgress"], None]]:
    """Show a bar from the first event on.

    Yields:
        What to call after each tensor.
    """
    eta = TextColumn("ETA"), TimeRemainingColumn()
    bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), *eta)
    task = bar.add_task("", total=None)

    def show(event: "QuantizeProgress") -> None:
        text = f"shard {event.shard}/{event.num_shards}"
        bar.update(task, completed=event.done_bytes, total=event.total_bytes, description=text)
        bar.start()

    try:
        yield show
    finally:
        # A bar that was never shown would end in an empty line.
        if bar.live.is_started:
            bar.stop()
