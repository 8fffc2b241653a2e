"""`inspect`: what can shrink, what cannot and why, and what each layer costs, as a table and as JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from torch import nn

from keepk.graph.costs import LayerCost, model_costs, per_what
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
from keepk.graph.given import TraceInputs, quantised_module
from keepk.graph.graph import Graph
from keepk.graph.trace import trace_inputs
from keepk.graph.units import Group as UnitGroup
from keepk.graph.wrappers import unwrap
from keepk.run.channel_members import single_channels
from keepk.show.tables import Table, percent

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable

WIDTH = 120
NAMES = 5  # how many names a line has; the JSON form has all
NAMES_IN_TABLE = 3
MARGIN = "  "
AS_A_WHOLE = (
    "is one unit, all of a layer: it could only go as a whole, and something of every layer stays; a Pruner counts it "
    "among those that it keeps"
)
ONE_CHANNEL = "has one channel, and something of every layer stays; a Pruner does not count it"
PLAINLY = {
    "input": "read from an axis without channels, such as an input of the model",
    "output": "outputs of the model",
    "kernel": "kernels of convolutions",
}


@dataclass(frozen=True, repr=False)
class Inspection:
    """What `keepk.inspect` found, in plain values. It shows itself as a table, richly on a rich console.

    Attributes:
        model: The model's class.
        example: Shapes (and types, where they are not float32) of the tensors that forward was called with.
        spaces: What can shrink.
        fixed: What cannot, by reason.
        bindings: Of which parts equal numbers must go.
        layers: Parameters and multiply-accumulates (MACs) per sample of each module, without the modules inside it.
        batch: How many samples the example has, by which its MACs were divided. None if that could not be told, because
            its tensors share no first dimension, or MACs do not grow with it: MACs are of the whole example then.
        unknown: Parts of the model's forward that the trace has not seen, such as a train mode that fails.
        attributes: Attributes that are as large as something that can shrink and keep their values when it does:
            forward does not need them, and they may be equal to it by chance.
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
        """All parameters, shared ones once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass, per sample; of the whole example if `batch` is None."""
        return sum(layer.macs for layer in self.layers)

    def json(self) -> str:
        """Everything, and the totals, as JSON."""
        return json.dumps({**asdict(self), "parameters": self.parameters, "macs": self.macs}, indent=2)

    def data(self) -> dict[str, Any]:
        """Everything, and the totals, as plain dicts, lists, words and numbers: what JSON gives back."""
        plain: dict[str, Any] = json.loads(self.json())
        return plain

    def __str__(self) -> str:
        lines = [_headline(self)]
        for section in _sections(self):
            lines.append(section.title)
            if section.table:
                lines.append(indent(str(section.table), MARGIN))
            for note in section.notes:
                lines.append(_wrapped(note.what, MARGIN))
                if note.why:
                    lines.append(_wrapped(note.why, MARGIN * 3))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)  # what an interactive session shows without a print

    def __rich__(self) -> "Group":
        from rich.console import Group  # noqa: PLC0415 - only a rich console calls this
        from rich.padding import Padding  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

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
    """Say what of a model can shrink, what cannot and why, and what each layer costs; nothing of the model changes.

    Args:
        model: Any module whose forward works on the example.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments, with a batch of two or more.
        examples: Several of these, for a model that takes different paths; costs are those of the first.
        training_example: The input of forward in train mode, if it differs.

    Returns:
        Units that can be removed, axes that cannot and why, costs by layer, and parts of the model's forward that the
        trace has not seen, such as a train mode that fails on the example.

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
    """A space of one unit that has an axis to itself, as what it is: nothing would be left of the axis without it."""
    if len(space.units) > 1:
        return None
    totals = {(axis.tensor, axis.dim): axis.size for axis in graph.wiring.axes}
    slices = Counter((tensor, axis) for tensor, axis, _ in graph.slices(int(space.units[0])))
    axes = tuple(FixedAxis(*place, channels, totals[place]) for place, channels in slices.items())
    if all(axis.channels < axis.total for axis in axes):
        return None
    return FixedGroup("operation", AS_A_WHOLE, (), axes)


def _quantised(model: nn.Module) -> Iterator[str]:
    """A model that is quantised or prepared for that has few channels that can be followed, or none."""
    if found := quantised_module(model):
        yield (
            f"{found}, so its channels cannot be followed. Prune first and quantise afterwards: inspect the model "
            f"as it was before it was prepared"
        )


def _single(graph: Graph, model: nn.Module) -> Iterator[FixedGroup]:
    """The layers with one channel that another one reads."""
    modules = dict(model.named_modules())
    pairs = [pair for pair in single_channels(graph, modules) if set(pair) <= set(modules)]
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
        why = "forward does not need them, and they may be equal to a size by chance: check them after a removal"
        yield _Section("Attributes that stay as they are", None, (_Note(_some(report.attributes), why),))
    if report.layers:
        yield _Section(f"Layers (MACs {per_what(report.batch)})", _layer_table(report), ())


def _space_table(spaces: Sequence[SpaceFound]) -> Table:
    axes = [_axes([(axis.tensor, axis.axis, "") for axis in space.axes], NAMES_IN_TABLE) for space in spaces]
    width = max(map(len, axes))
    rows = tuple(
        (space.name, f"{space.units:,}", space.kind, "lossy" if space.lossy else "exact", words.ljust(width))
        for space, words in zip(spaces, axes, strict=True)
    )
    return Table(("space", "units", "kind", "removal", "axes".ljust(width)), rows)


def _lossy_notes(spaces: Iterable[SpaceFound]) -> Iterator[_Note]:
    """One note a reason; the same line of a repeated block is one reason."""
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
    """One note a reason."""
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
    """Axes in words: (tensor, axis, what to add)."""
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
    """A table for a narrow console: words are wrapped rather than cut off."""
    rich = table.__rich__()
    for column, title in zip(rich.columns, table.columns, strict=True):
        if title.strip() in ("space", "axes", "layer", "type"):
            column.no_wrap, column.overflow, column.justify = False, "fold", "left"
    return rich
