"""`Table`: rows of text that render as plain ASCII, Markdown, HTML in notebooks, or a rich table."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from keepk.run.report import LayerCount, PlanReport, PlanSpan

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """A table of strings. The first column is left-aligned, the others right-aligned.

    Attributes:
        columns: The headings.
        rows: The cells, already formatted; every row has one cell per column.
        title: Printed above the table; an empty title is omitted.
        total_row: Whether the last row is a total, set off by a rule.
    """

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
        """The table in Markdown. The title is omitted: the pages that use this have headings.

        >>> print(Table(("layer", "kept"), (("fc1", "7"),)).markdown())
        | layer | kept |
        |---|---:|
        | fc1 | 7 |
        """
        rule = "|---|" + "---:|" * (len(self.columns) - 1)
        return "\n".join([_barred(self.columns), rule, *map(_barred, self.rows)])

    def _repr_html_(self) -> str:
        """The table for notebooks.

        Layer names and reasons come from the user's model, so every cell is escaped.

        >>> Table(("layer",), (("a<b",),))._repr_html_()
        '<table><thead><tr><th style="text-align: left">layer</th></tr></thead><tbody><tr><td style="text-align: left">a&lt;b</td></tr></tbody></table>'
        """  # noqa: E501 - the output of a doctest cannot be wrapped
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        *rows, last = [_html_row(row, "td") for row in self.rows] or [""]
        body, foot = ("".join(rows), f"<tfoot>{last}</tfoot>") if self.total_row else ("".join([*rows, last]), "")
        return f"<table>{caption}<thead>{_html_row(self.columns, 'th')}</thead><tbody>{body}</tbody>{foot}</table>"

    def __rich__(self) -> "RichTable":
        from rich import box  # noqa: PLC0415 - only a rich console calls this
        from rich.table import Table as RichTable  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = RichTable(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        # Text objects, because rich would read the brackets of a name such as "blocks[0]" as markup.
        table.title_style = "bold"
        for position, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if position else "left", no_wrap=True)
        for position, row in enumerate(self.rows, start=1):
            summed = self.total_row and position == len(self.rows)
            before_sum = self.total_row and position == len(self.rows) - 1
            table.add_row(*map(Text, row), style="bold" if summed else None, end_section=before_sum)
        return table


def plan_table(report: PlanReport) -> Table:
    """The plan with one row per event. Consecutive epochs with the same count share a row.

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
    """Kept units by layer, with `total` as a last row if given.

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
    """A share as a percentage with two decimals; "-" if the whole is empty.

    >>> percent(1, 3), percent(0, 0)
    ('33.33%', '-')
    """
    return f"{part / of:.2%}" if of else "-"


def _epochs(span: PlanSpan) -> str:
    return str(span.first) if span.first == span.last else f"{span.first}-{span.last}"


def _barred(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _html_row(cells: Sequence[str], tag: str) -> str:
    sides = ("left", *["right"] * (len(cells) - 1))
    html = (
        f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(html)}</tr>"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = cells
    justified = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([f"{name:<{widths[0]}}", *justified]).rstrip()
