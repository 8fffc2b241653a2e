"""A plan drawn with characters, and a progress bar over epochs (rich, the extra ``keepk[cli]``)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from keepk.reports.tables import PlanReport

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

WIDTH = 80
MOST_COLUMNS_PER_EPOCH = 6
AXIS_NAME = " epoch"
# Fill levels of a cell in eighths; in ASCII a cell is drawn as full from one half on.
EIGHTHS = " ▁▂▃▄▅▆▇█"
EIGHTHS_IN_ASCII = " ___#####"


@dataclass(frozen=True)
class PlanPlot:
    """A plot of the units left after each epoch, as filled columns. Epoch 0 is the dense network.

    Attributes:
        report: The plan.
        height: The number of rows of the columns.
    """

    report: PlanReport
    height: int = 10

    def __str__(self) -> str:
        """The plot in plain ASCII, at most 80 columns wide.

        >>> print(PlanPlot(PlanReport(1000, (400, 250, 250, 250)), height=4))
        1,000 |######
              |######
              |############
              |############################## 250
            0 +------------------------------
               0     1     2     3     4      epoch
        """
        return "\n".join(self.lines(WIDTH, unicode=False))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Text]":
        from rich.text import Text  # noqa: PLC0415 - only a rich console calls this

        for line in self.lines(min(options.max_width, WIDTH), unicode=not options.ascii_only):
            yield Text(line, style="cyan", no_wrap=True, overflow="crop")

    def lines(self, width: int, *, unicode: bool) -> list[str]:
        """The lines of the plot from top to bottom, at most `width` characters each."""
        top, end = f"{self.report.total:,}", f"{self.report.keep:,}"
        right = max(len(end) + 1, len(AXIS_NAME) + len(str(len(self.report.counts))))
        epochs = _epoch_of_column(len(self.report.counts), width - len(top) - 2 - right)
        eighths = [self._eighths(epoch) for epoch in epochs]
        wall, corner, floor = ("┤", "└", "─") if unicode else ("|", "+", "-")
        rows = [_row(eighths, level, EIGHTHS if unicode else EIGHTHS_IN_ASCII) for level in range(self.height)]
        rows[(eighths[-1] - 1) // 8] += f" {end}"
        labels = [*[""] * (self.height - 1), top]
        drawn = [f"{label:>{len(top)}} {wall}{row}".rstrip() for label, row in zip(labels, rows, strict=True)]
        axis = f"{'0':>{len(top)}} {corner}{floor * len(epochs)}"
        return [*reversed(drawn), axis, f"{'':>{len(top)}}  {_ticks(epochs)}{AXIS_NAME}"]

    def _eighths(self, epoch: int) -> int:
        left = self.report.counts[epoch - 1] if epoch else self.report.total
        # At least one eighth, so that a plan that keeps 0.1 % does not look as if it kept nothing.
        return max(1, left * self.height * 8 // self.report.total)


def _epoch_of_column(last: int, room: int) -> list[int]:
    """The epoch that each column shows: each epoch repeated if there is room, evenly spaced epochs otherwise."""
    if last < room:
        wide = min(MOST_COLUMNS_PER_EPOCH, room // (last + 1))
        return [epoch for epoch in range(last + 1) for _ in range(wide)]
    columns = max(2, room)
    return [column * last // (columns - 1) for column in range(columns)]


def _row(eighths: list[int], level: int, fills: str) -> str:
    return "".join(fills[min(8, max(0, column - 8 * level))] for column in eighths).rstrip()


def _ticks(epochs: list[int]) -> str:
    """The labels below the axis: multiples of the smallest round step at which they do not touch."""
    apart = len(str(epochs[-1])) + 2
    steps = (base * 10**power for power in count() for base in (1, 2, 5))
    step = next(step for step in steps if step * len(epochs) >= apart * (epochs[-1] + 1))
    line = [" "] * len(epochs)
    for tick in range(0, epochs[-1] + 1, step):
        start = next(column for column, epoch in enumerate(epochs) if epoch >= tick)
        line[start : start + len(str(tick))] = str(tick)
    return "".join(line)


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


@contextmanager
def stage_progress(console: Console, stages: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar over the stages of a task; nothing where output is not a terminal.

    Args:
        console: Where the bar is drawn.
        stages: How often the callback will be called.

    Yields:
        A callback that takes the name of each stage as it begins.
    """
    columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar, begun = progress.add_task("", total=stages), count()
        yield lambda stage: progress.update(bar, completed=next(begun), description=stage, refresh=True)
