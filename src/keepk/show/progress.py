"""A progress bar over epochs (rich, the extra ``keepk[cli]``)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def epoch_progress(console: Console, epochs: int) -> Iterator[Callable[[str, str], None]]:
    """Show a progress bar over epochs.

    Args:
        console: Where the bar is drawn.
        epochs: How often the callback will be called.

    Yields:
        A callback that takes the name of the phase and a short status, to be called at the end of every epoch.
    """
    columns = (
        TextColumn("[bold]{task.description:<9}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", style="cyan", markup=False),  # names may contain brackets
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=epochs, words="")
        yield lambda phase, words: progress.update(bar, advance=1, description=phase, words=words)
