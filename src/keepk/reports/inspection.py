"""`inspect`: report which units of a model can be removed, which cannot and why, and the cost of each layer."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from html import escape
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from torch import nn

from keepk.graph.findings import (
    EqualParts,
    FixedAxis,
    FixedGroup,
    SpaceFound,
    Where,
    attributes_beside,
    equal_parts,
    fixed_groups,
    spaces_found,
    tensor_specs,
)
from keepk.graph.graph import Graph
from keepk.graph.trace import trace_inputs
from keepk.graph.units import Group as UnitGroup
from keepk.model.costs import LayerCost, model_costs, per_what
from keepk.model.example import TraceInputs, quantised_module
from keepk.model.names import unwrap
from keepk.reports.tables import Table, percent
from keepk.run.channel_members import layers_of_one_channel

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable

WIDTH = 120
NAMES = 5  # names listed in a line before "and 3 more"; `Inspection.json` lists all
NAMES_IN_TABLE = 3  # fewer, because the table has four more columns
SCREEN = 40  # lines; a longer report has a shortened repr
SHORT = 4  # rows or notes that each section of a shortened repr shows
MARGIN = "  "
AS_A_WHOLE = "is the only unit of its layer, and every layer keeps at least one unit; a Pruner counts it as kept"
ONE_CHANNEL = "has one channel, and every layer keeps at least one; a Pruner does not count it"
PLAINLY = {
    "input": "read from an axis without channels, such as an input of the model",
    "output": "outputs of the model",
    "kernel": "kernels of convolutions",
}


@dataclass(frozen=True, repr=False)
class Inspection:
    """The result of `keepk.inspect`, as plain values. ``print`` shows all of it; a long ``repr`` is shortened.

    Attributes:
        model: The name of the model's class.
        example: Shapes of the tensors that forward was called with, and dtypes other than float32.
        spaces: Groups of units that can be removed.
        fixed: Axes that cannot shrink, grouped by reason.
        bindings: Parts that must lose equal numbers of units.
        layers: Parameters and multiply-accumulates (MACs) per sample of each module, excluding its submodules.
        batch: The number of samples in the example, by which MACs were divided. None if it could not be determined,
            because the tensors share no first dimension or MACs do not grow with it; MACs then refer to the whole
            example.
        unknown: Parts of the model's forward that the trace could not follow, such as a train mode that fails.
        attributes: Attributes that equal the size of something that can shrink and would keep their value: forward
            does not use them, and they may equal it by coincidence.
    """

    model: str
    example: tuple[str, ...]
    spaces: tuple[SpaceFound, ...]
    fixed: tuple[FixedGroup, ...]
    bindings: tuple[EqualParts, ...]
    layers: tuple[LayerCost, ...]
    batch: int | None
    unknown: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters; shared ones count once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass, per sample, or for the whole example if `batch` is None."""
        return sum(layer.macs for layer in self.layers)

    def json(self) -> str:
        """All attributes and the totals, as JSON."""
        return json.dumps({**asdict(self), "parameters": self.parameters, "macs": self.macs}, indent=2)

    def data(self) -> dict[str, Any]:
        """All attributes and the totals, as plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(self.json())
        return plain

    def __str__(self) -> str:
        return "\n".join([_headline(self), *(line for section in _sections(self) for line in section.lines())])

    def __repr__(self) -> str:
        text = str(self)
        if text.count("\n") < SCREEN:
            return text
        # A ResNet-50 has 160 layers, which would scroll the answer out of sight in an interactive session.
        shortened = (line for section in _sections(self) for line in section.lines(SHORT))
        return "\n".join([_headline(self), *shortened, "print() shows all of it."])

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{escape(_headline(self))}</b></p>"]
        for section in _sections(self):
            parts.append(f"<p><b>{escape(section.title)}</b></p>")
            if section.table:
                parts.append(section.table._repr_html_())
            if section.notes:
                parts.append(f"<ul>{''.join(map(_html_note, section.notes))}</ul>")
        return "".join(parts)

    def __rich__(self) -> "Group":
        from rich.console import Group  # noqa: PLC0415 - only a rich console calls this
        from rich.padding import Padding  # noqa: PLC0415 - only a rich console calls this
        from rich.text import Text  # noqa: PLC0415 - only a rich console calls this

        parts: list[Any] = [Text(_headline(self), style="bold")]
        for section in _sections(self):
            parts.append(Text(f"\n{section.title}", style="bold"))
            if section.table:
                parts.append(Padding(_wrapping(section.table), (0, 0, 0, len(MARGIN))))
            for note in section.notes:
                parts.append(Padding(Text(note.what), (0, 0, 0, len(MARGIN))))
                if note.why:
                    parts.append(Padding(Text(note.why, style="dim"), (0, 0, 0, len(MARGIN) * 3)))
        return Group(*parts)


def inspect(
    model: nn.Module, example: Any = None, *, examples: Sequence[Any] | None = None, training_example: Any = None
) -> Inspection:
    """Report which units of a model can be removed, which cannot and why, and what each layer costs.

    The model is traced on a copy; it does not change.

    Args:
        model: Any module whose forward works on the example.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments, with a batch size of at
            least 2.
        examples: Several of these instead, for a model that takes different paths; costs are those of the first.
        training_example: The input of forward in train mode, if it differs.

    Returns:
        The units that can be removed, the axes that cannot shrink with the reasons, the costs of each layer, and the
        parts of the model's forward that the trace could not follow, such as a train mode that fails on the example.

    Raises:
        TraceError: If `model` is not a module, the example is missing or malformed, or the model's forward fails on it.

    Examples:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> print(inspect(net, torch.zeros(2, 8)))
        Sequential: 75 parameters, 66 MACs per sample (example: 2x8)
        Can shrink: 6 units in 1 space
          space  units     kind  removal  axes
          -----  -----  -------  -------  ----------------------------------------------
          0          6  channel    exact  axis 0 of 0.weight, 0.bias; axis 1 of 2.weight
        Cannot shrink
          read from an axis without channels, such as an input of the model: axis 1 of 0.weight
          outputs of the model (container.py:...): axis 0 of 2.weight, 2.bias
        Layers (MACs per sample)
          layer    type  parameters  MACs   MACs %
          -----  ------  ----------  ----  -------
          0      Linear          54    48   72.73%
          2      Linear          21    18   27.27%
          -----  ------  ----------  ----  -------
          total                  75    66  100.00%
    """
    inner = unwrap(model) if isinstance(model, nn.Module) else model
    inputs = TraceInputs.of(example, examples, training_example)
    graph = trace_inputs(inner, replace(inputs, reports=True))
    example = examples[0] if example is None and examples else example
    whole = {number: group for number, group in enumerate(map(partial(_as_a_whole, graph), graph.groups)) if group}
    costs = model_costs(inner, example)
    return Inspection(
        model=type(inner).__name__,
        example=tensor_specs(example),
        spaces=tuple(space for number, space in enumerate(spaces_found(graph)) if number not in whole),
        fixed=(*whole.values(), *_single(graph, inner), *fixed_groups(graph)),
        bindings=equal_parts(graph),
        layers=costs.layers,
        batch=costs.batch,
        unknown=(*graph.unknown, *_quantised(inner)),
        attributes=attributes_beside(graph),
    )


def _as_a_whole(graph: Graph, space: UnitGroup) -> FixedGroup | None:
    """The reason why a group of one unit is fixed, if the unit fills an axis that would otherwise become empty."""
    if len(space.units) > 1:
        return None
    totals = {(axis.tensor, axis.dim): axis.size for axis in graph.wiring.axes}
    slices = Counter((tensor, axis) for tensor, axis, _ in graph.slices(int(space.units[0])))
    axes = tuple(FixedAxis(*place, channels, totals[place]) for place, channels in slices.items())
    if all(axis.channels < axis.total for axis in axes):
        return None
    return FixedGroup("operation", AS_A_WHOLE, (), axes)


def _quantised(model: nn.Module) -> Iterator[str]:
    """A note for a model that is quantised or prepared for it: few of its channels, if any, can be traced."""
    if found := quantised_module(model):
        yield (
            f"{found}, so its channels cannot be followed. Prune first and quantise afterwards: inspect the model "
            f"before it is prepared for quantisation"
        )


def _single(graph: Graph, model: nn.Module) -> Iterator[FixedGroup]:
    """The layers that have a single channel, together with the layers that read it."""
    modules = dict(model.named_modules())
    pairs = [pair for pair in layers_of_one_channel(graph, modules) if set(pair) <= set(modules)]
    sides = [(f"{pair[side]}.weight", modules[pair[side]], side) for pair in pairs for side in (0, 1)]
    axes = tuple(
        # A transposed convolution has its output channels on axis 1.
        FixedAxis(name, side if not hasattr(module, "transposed") or not module.transposed else 1 - side, 1, 1)
        for name, module, side in dict.fromkeys(sides)
    )
    if axes:
        yield FixedGroup("operation", ONE_CHANNEL, (), axes)


@dataclass(frozen=True)
class _Note:
    what: str
    why: str = ""


@dataclass(frozen=True)
class _Section:
    title: str
    table: Table | None
    notes: tuple[_Note, ...]

    def lines(self, most: int | None = None) -> Iterator[str]:
        """The section as text, with at most `most` rows and `most` notes."""
        yield self.title
        if self.table:
            rows = self.table.rows
            # The total is the most useful row, so it is shown even if others are omitted.
            totals = rows[len(rows) - 1 :] if self.table.total_row else ()
            body = rows[: len(rows) - len(totals)]
            yield indent(str(replace(self.table, rows=(*body[:most], *totals))), MARGIN)
            yield from _omitted(len(body), most, "row")
        for note in self.notes[:most]:
            yield _wrapped(note.what, MARGIN)
            if note.why:
                yield _wrapped(note.why, MARGIN * 3)
        yield from _omitted(len(self.notes), most, "note")


def _omitted(count: int, most: int | None, word: str) -> Iterator[str]:
    if most is not None and count > most:
        yield f"{MARGIN}... and {count - most:,} more {_plural(word, count - most)}"


def _html_note(note: _Note) -> str:
    why = f"<br><small>{escape(note.why)}</small>" if note.why else ""
    return f"<li>{escape(note.what)}{why}</li>"


def _headline(report: Inspection) -> str:
    example = ", ".join(report.example) or "no tensors"
    macs = f"{report.macs:,} MACs {per_what(report.batch)}"
    return f"{report.model}: {report.parameters:,} parameters, {macs} (example: {example})"


def _sections(report: Inspection) -> Iterator[_Section]:
    units = sum(space.units for space in report.spaces)
    table = _space_table(report.spaces) if report.spaces else None
    title = (
        f"Can shrink: {units:,} {_plural('unit', units)} in {len(report.spaces)} {_plural('space', len(report.spaces))}"
    )
    yield _Section(title if report.spaces else "Can shrink: nothing", table, tuple(_lossy_notes(report.spaces)))
    if report.fixed:
        yield _Section("Cannot shrink", None, tuple(map(_fixed_note, report.fixed)))
    if report.bindings:
        yield _Section("Must lose equal numbers", None, tuple(map(_equal_note, report.bindings)))
    if any(space.multiple > 1 for space in report.spaces):
        yield _Section("Must keep a multiple", None, tuple(_multiple_notes(report.spaces)))
    if report.unknown:
        yield _Section("Not seen by the trace", None, tuple(map(_Note, report.unknown)))
    if report.attributes:
        why = "forward does not use them, and they may equal a size by coincidence: check them after a removal"
        yield _Section("Attributes that stay as they are", None, (_Note(_some(report.attributes), why),))
    if report.layers:
        yield _Section(f"Layers (MACs {per_what(report.batch)})", _layer_table(report), ())


def _space_table(spaces: Sequence[SpaceFound]) -> Table:
    axes = [_axes([(axis.tensor, axis.axis, "") for axis in space.axes], NAMES_IN_TABLE) for space in spaces]
    width = max(map(len, axes))  # padded, because a table aligns all columns but the first to the right
    rows = tuple(
        (space.name, f"{space.units:,}", space.kind, "lossy" if space.lossy else "exact", words.ljust(width))
        for space, words in zip(spaces, axes, strict=True)
    )
    return Table(("space", "units", "kind", "removal", "axes".ljust(width)), rows)


def _lossy_notes(spaces: Iterable[SpaceFound]) -> Iterator[_Note]:
    """One note per reason; repeated blocks that fail at the same line share one."""
    alike = dict[tuple[object, ...], list[SpaceFound]]()
    for space in spaces:
        if space.lossy:
            key = (space.why, *((where.operation, where.place) for where in space.where))
            alike.setdefault(key, []).append(space)
    for found in alike.values():
        names = _some([space.name for space in found])
        places = tuple(dict.fromkeys(where for space in found for where in space.where))
        yield _Note(f"lossy (removing one changes what the others compute): {names}", _reason(found[0].why, places))


def _fixed_note(group: FixedGroup) -> _Note:
    if group.kind == "kernel":
        return _Note(f"{PLAINLY[group.kind]}: {len(group.axes)} {'axis' if len(group.axes) == 1 else 'axes'}")
    axes = _axes([(axis.tensor, axis.axis, _part(axis)) for axis in group.axes])
    if group.kind == "output":
        return _Note(f"{_reason(PLAINLY[group.kind], group.where)}: {axes}")
    if group.kind == "input":
        return _Note(f"{PLAINLY[group.kind]}: {axes}")
    return _Note(axes, _reason(group.why, group.where))


def _part(axis: FixedAxis) -> str:
    return "" if axis.channels == axis.total else f" ({axis.channels} of {axis.total})"


def _equal_note(equal: EqualParts) -> _Note:
    sizes = list(dict.fromkeys(equal.parts))
    each = (
        f"{sizes[0]} {_plural('unit', sizes[0])}" if len(sizes) == 1 else f"{_some(list(map(str, equal.parts)))} units"
    )
    return _Note(f"{len(equal.parts)} parts of {each}: {_some(equal.spaces)}", _reason(equal.why, equal.where))


def _multiple_notes(spaces: Iterable[SpaceFound]) -> Iterator[_Note]:
    """One note per reason."""
    alike = dict[tuple[int, str], list[str]]()
    for space in spaces:
        if space.multiple > 1:
            alike.setdefault((space.multiple, space.why_multiple), []).append(space.name)
    for (multiple, why), names in alike.items():
        yield _Note(f"of {multiple} units: {_some(names)}", why)


def _layer_table(report: Inspection) -> Table:
    rows = [
        (
            layer.name or "(model)",
            layer.type,
            f"{layer.parameters:,}",
            f"{layer.macs:,}",
            percent(layer.macs, report.macs),
        )
        for layer in report.layers
    ]
    total = ("total", "", f"{report.parameters:,}", f"{report.macs:,}", percent(report.macs, report.macs))
    return Table(("layer", "type", "parameters", "MACs", "MACs %"), (*rows, total), total_row=True)


def _axes(axes: Sequence[tuple[str, int, str]], most: int = NAMES) -> str:
    """Format axes, given as (tensor, axis, suffix), grouped by axis number."""
    named = dict[int, list[str]]()
    for tensor, axis, addition in axes[:most]:
        named.setdefault(axis, []).append(f"{tensor}{addition}")
    words = "; ".join(f"axis {axis} of {', '.join(tensors)}" for axis, tensors in named.items())
    return words if len(axes) <= most else f"{words} and {len(axes) - most} more"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES])
    return shown if len(names) <= NAMES else f"{shown} and {len(names) - NAMES} more"


def _reason(why: str, places: Sequence[Where]) -> str:
    if not places:
        return why
    others = f", and {len(places) - 1} more like it" if len(places) > 1 else ""
    return f"{why} ({places[0]}{others})"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _wrapped(text: str, margin: str) -> str:
    return fill(
        text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


def _wrapping(table: Table) -> "RichTable":
    """The table for a narrow console: long names are wrapped instead of truncated."""
    rich = table.__rich__()
    for column, title in zip(rich.columns, table.columns, strict=True):
        if title.strip() in ("space", "axes", "layer", "type"):
            column.no_wrap, column.overflow, column.justify = False, "fold", "left"
    return rich
