"""Tables, and the plain values that they are made from.

A `Table` has rows of text and renders as plain ASCII, Markdown, HTML in notebooks, or a rich table. `PlanReport`,
`EpochRecord` and `LayerCount` describe plans, epochs and layers of a run as plain values, from which tables and figures
are made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from keepk.errors import PlanError
from keepk.plan.numbers import count
from keepk.plan.schedules import AnySchedule, plan
from keepk.plan.spaces import weights


@dataclass(frozen=True)
class LayerCount:
    """How many units (weights or channels) of one layer are kept."""

    name: str
    total: int
    kept: int


@dataclass(frozen=True)
class EpochRecord:
    """The end of one epoch: how many units are left, and the validation accuracy in percent."""

    phase: str
    kept: int
    accuracy: float


@dataclass(frozen=True)
class PlanSpan:
    """Epochs `first` to `last`, which keep the same number; `pruned` units are pruned at the end of `first`."""

    first: int
    last: int
    kept: int
    pruned: int


def plan_html(plan: Mapping[str, Sequence[int]]) -> str:
    """The plans of all spaces as an HTML table, with a row for each event at which any count changes.

    >>> plan_html({"fc": (50, 50, 10)}).count("<tr>")
    3
    """
    # Plans can have hundreds of epochs, most of them without a change; always show the first and the last one.
    events = [*zip(*plan.values(), strict=True)]
    rows = [
        (str(epoch), *(f"{count:,}" for count in counts))
        for epoch, counts in enumerate(events, start=1)
        if epoch in (1, len(events)) or counts != events[epoch - 2]
    ]
    return html_table(("epoch", *plan), rows)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A small HTML table for notebooks. Names of modules and spaces are escaped.

    >>> html_table(["space", "kept"], [["<lambda>", "7"]])
    '<table><tr><th>space</th><th>kept</th></tr><tr><td>&lt;lambda&gt;</td><td>7</td></tr></table>'
    """
    lines = [("th", columns), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


@dataclass(frozen=True)
class PlanReport:
    """A checked plan: M, and how many units are left after epochs 1, 2, ... A notebook shows it as a table."""

    total: int
    counts: tuple[int, ...]

    @property
    def keep(self) -> int:
        """K, where the plan ends."""
        return self.counts[-1]

    @property
    def spans(self) -> list[PlanSpan]:
        """The plan with epochs that prune nothing folded into the span before them.

        >>> PlanReport(100, (50, 50, 10)).spans
        [PlanSpan(first=1, last=2, kept=50, pruned=50), PlanSpan(first=3, last=3, kept=10, pruned=40)]
        """
        before = (self.total, *self.counts)  # so that before[e] is the count after epoch e, and before[0] is M
        changed = [epoch for epoch in range(1, len(before)) if epoch == 1 or before[epoch] != before[epoch - 1]]
        return [
            PlanSpan(first, following - 1, before[first], before[first - 1] - before[first])
            for first, following in pairwise([*changed, len(before)])
        ]

    def _repr_html_(self) -> str:
        rows = [(f"{it.first}-{it.last}" if it.last > it.first else str(it.first), f"{it.kept:,}") for it in self.spans]
        return html_table(("epoch", "kept"), rows)


def plan_report(
    schedule: AnySchedule, total: int, *, keep: int | None = None, prune: float | None = None, epochs: int | None = None
) -> PlanReport:
    """The plan for `total` weights, given a count to keep or a share to prune, as a `Pruner` would make it.

    >>> plan_report([400, 250], 1000, prune=0.75)
    PlanReport(total=1000, counts=(400, 250))
    """
    count(total, "plan: total", PlanError, least=1)
    if epochs is not None:
        count(epochs, "plan: epochs", PlanError, least=1)
    # A space does the conversion, so that a share becomes the same count here as in a run.
    kept = weights("*", keep=keep, prune=prune, name="plan").count_kept(total)
    return PlanReport(total, plan(schedule, total, kept, epochs=epochs))


def layer_counts(masks: Mapping[str, Tensor]) -> list[LayerCount]:
    """The kept entries of each layer, in the order of the masks: ``fc1`` has ``fc1.weight`` and ``fc1.bias``.

    >>> import torch
    >>> layer_counts({"fc1.weight": torch.tensor([True, False]), "fc1.bias": torch.tensor([False])})
    [LayerCount(name='fc1', total=3, kept=1)]
    """
    # A parameter of the model itself has no layer name, so it is listed under its own name.
    layers = dict[str, list[Tensor]]()
    for name, mask in masks.items():
        layers.setdefault(name.rpartition(".")[0] or name, []).append(mask)
    return [
        LayerCount(layer, sum(mask.numel() for mask in found), sum(int(mask.count_nonzero()) for mask in found))
        for layer, found in layers.items()
    ]


def whole(layers: Sequence[LayerCount], name: str = "total") -> LayerCount:
    """The sum over all layers.

    >>> whole([LayerCount("a", 10, 1), LayerCount("b", 5, 2)])
    LayerCount(name='total', total=15, kept=3)
    """
    return LayerCount(name, sum(layer.total for layer in layers), sum(layer.kept for layer in layers))


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
        from rich.table import Table as RichTable  # noqa: PLC0415 - only a rich console calls this
        from rich.text import Text  # noqa: PLC0415 - only a rich console calls this

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
