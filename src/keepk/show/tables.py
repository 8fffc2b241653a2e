"""Tables that print themselves: plainly with ``print``, richly on a rich console."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepk.run.report import LayerCount, PlanReport, PlanSpan

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Words in rows: the first column is a name, the others are numbers; the last row may be a sum."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    total_row: bool = False

    def __str__(self) -> str:
        """The table in plain ASCII.

        >>> print(Table(("layer", "kept"), (("fc1", "7"), ("total", "12")), total_row=True))
        layer  kept
        -----  ----
        fc1       7
        -----  ----
        total    12
        """
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        rule = "  ".join("-" * width for width in widths)
        lines = [_aligned(self.columns, widths), rule, *(_aligned(row, widths) for row in self.rows)]
        if self.total_row:
            lines.insert(-1, rule)
        return "\n".join([self.title, *lines] if self.title else lines)

    def markdown(self) -> str:
        """The table as Markdown has it.

        >>> print(Table(("layer", "kept"), (("fc1", "7"),)).markdown())
        | layer | kept |
        |---|---:|
        | fc1 | 7 |
        """
        rule = "|---|" + "---:|" * (len(self.columns) - 1)
        return "\n".join([_barred(self.columns), rule, *map(_barred, self.rows)])

    def __rich__(self) -> "RichTable":
        from rich import box  # noqa: PLC0415 - only a rich console calls this
        from rich.table import Table as RichTable  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = RichTable(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.title_style = "bold"
        for position, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if position else "left", no_wrap=True)
        for position, row in enumerate(self.rows, start=1):
            summed = self.total_row and position == len(self.rows)
            before_sum = self.total_row and position == len(self.rows) - 1
            table.add_row(*map(Text, row), style="bold" if summed else None, end_section=before_sum)
        return table


def plan_table(report: PlanReport) -> Table:
    """The plan, one row per event; epochs at which nothing changes are folded.

    >>> print(plan_table(PlanReport(1000, (400, 250, 250, 250))))
    epoch  kept       %  pruned
    -----  ----  ------  ------
    1       400  40.00%     600
    2-4     250  25.00%     150
    """
    rows = tuple(
        (_epochs(span), f"{span.kept:,}", percent(span.kept, report.total), f"{span.pruned:,}") for span in report.spans
    )
    return Table(("epoch", "kept", "%", "pruned"), rows)


def layer_table(layers: Sequence[LayerCount], *, title: str = "", total: LayerCount | None = None) -> Table:
    """Kept of total by layer, and the sum in a last row if it is given.

    >>> print(layer_table([LayerCount("fc1", 2000, 15)]))
    layer  total  kept      %
    -----  -----  ----  -----
    fc1    2,000    15  0.75%
    """
    rows = tuple(
        (layer.name, f"{layer.total:,}", f"{layer.kept:,}", percent(layer.kept, layer.total))
        for layer in ([*layers, total] if total else layers)
    )
    return Table(("layer", "total", "kept", "%"), rows, title, total_row=total is not None)


def percent(part: int, of: int) -> str:
    """A share in words.

    >>> percent(1, 3), percent(0, 0)
    ('33.33%', '-')
    """
    return f"{part / of:.2%}" if of else "-"


def _epochs(span: PlanSpan) -> str:
    return str(span.first) if span.first == span.last else f"{span.first}-{span.last}"


def _barred(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = cells
    justified = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([f"{name:<{widths[0]}}", *justified]).rstrip()
