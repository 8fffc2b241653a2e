"""A progress bar over epochs (rich, the extra ``keepk[cli]``)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from keepk.run.report import EpochRecord


@contextmanager
def epoch_progress(console: Console, epochs: int) -> Iterator[Callable[[EpochRecord], None]]:
    """A bar that shows phase, epoch, weights kept and validation accuracy; call it at the end of every epoch."""
    columns = (
        TextColumn("[bold]{task.description:<9}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[kept]:>7,} kept", style="cyan"),
        TextColumn("validation {task.fields[accuracy]:6.2f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("dense", total=epochs, kept=0, accuracy=0.0)
        yield lambda epoch: progress.update(
            bar, advance=1, description=epoch.phase, kept=epoch.kept, accuracy=epoch.accuracy
        )
