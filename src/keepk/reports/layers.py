"""`RunReport.layers`: what every layer of a model has lost, and what it costs, as data, a table and a bar chart."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from keepk.errors import KeepkError
from keepk.model.costs import LayerCost, per_what
from keepk.reports.tables import Table, percent
from keepk.run.channel_members import module_of

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MARKS = {"channels": "#2f6f9f", "weights": "#b8742a"}
BEFORE = "#d9dde1"


@dataclass(frozen=True)
class LayerReport:
    """A module of the model, the units that it lost, and its cost now, without that of the modules inside it.

    Attributes:
        name: Its path in the model.
        type: The name of its class.
        channels: The channels that a space selects in it, before the first event; None without any. Layers that add to
            the same residual stream have the same channels, and each of them lists these.
        channels_kept: The channels left now; masked ones are not counted.
        weights: The weights that a space selects in it, before the first event; None without any.
        weights_kept: The weights left now; masked ones are not counted.
        parameters: The entries of its parameters now, masked ones included.
        macs: Multiply-accumulates of its own forward now, masked weights included; None if the Pruner has no example.
    """

    name: str
    type: str
    channels: int | None
    channels_kept: int | None
    weights: int | None
    weights_kept: int | None
    parameters: int
    macs: int | None


@dataclass(frozen=True, repr=False)
class LayersReport:
    """The layers of a model, in its order. It prints as a table, in color on a rich console, and as HTML in a notebook.

    Iterating yields a `LayerReport` for every module that has parameters or multiplies something. Their parameters and
    MACs add up to those of the model. The table has one row for all modules without units and MACs, such as norms.

    Attributes:
        rows: The layers.
        batch: The batch size by which MACs were divided; see `RunReport`.
    """

    rows: tuple[LayerReport, ...]
    batch: int | None

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> LayerReport:
        """The layer of a name."""
        found = next((it for it in self.rows if it.name == name), None)
        if found is None:
            raise KeepkError(f"report: the model has no layer {name!r} with parameters or MACs.")
        return found

    def data(self) -> list[dict[str, Any]]:
        """The layers as plain dicts."""
        return [asdict(it) for it in self.rows]

    def table(self) -> Table:
        """A table with a row per layer, and a total of parameters and MACs."""
        shown = [it for it in self.rows if it.macs or it.channels is not None or it.weights is not None]
        others = [it for it in self.rows if it not in shown]
        kinds = [kind for kind in MARKS if any(getattr(it, kind) is not None for it in shown)]
        counts_macs = any(it.macs is not None for it in self.rows)
        columns = ["layer", "type"]
        for kind in kinds:
            columns += [kind, "kept", "kept %"]
        columns += ["parameters", *(["MACs"] if counts_macs else [])]
        rows = [_cells(it, kinds, counts_macs) for it in shown]
        if others:
            rest = LayerReport("others", f"{len(others)} layers", None, None, None, None, *_costs(others))
            rows.append(_cells(rest, kinds, counts_macs))
        whole = LayerReport("total", f"{len(self.rows)} layers", None, None, None, None, *_costs(self.rows))
        rows.append(_cells(whole, kinds, counts_macs))
        macs = f", MACs are {per_what(self.batch)}" if counts_macs else ""
        include = "parameters and MACs include" if counts_macs else "parameters include"
        title = f"Layers now; kept counts leave out masked units, {include} masked entries{macs}"
        return Table(tuple(columns), tuple(rows), title, total_row=True)

    def plot(self, path: str | Path) -> None:
        """Draw a bar chart of the units and MACs of every layer, and save it.

        Args:
            path: The file; its ending says the format, such as ``.png`` or ``.svg``.

        Raises:
            KeepkError: matplotlib is not installed, or the format is unknown.
        """
        draw_layers(self, Path(path))

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        kept = sum(it.channels is not None or it.weights is not None for it in self.rows)
        return f"<LayersReport: {len(self)} layers, {kept} of them in a space; print() shows them>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> "RichTable":
        return self.table().__rich__()


NO_LAYERS = LayersReport((), None)


def layers_report(
    model: nn.Module,
    units: Sequence[tuple[str, str, int, int]],
    costs: Sequence[LayerCost] | None,
    batch: int | None,
) -> LayersReport:
    """The layers of a model.

    Args:
        model: The model.
        units: For layers of spaces: the module, "channels" or "weights", the units at first and those left now.
        costs: The cost of every module; None without an example to count MACs with.
        batch: The batch size of the example; None if it is not known.
    """
    rows = dict[str, LayerReport]()
    for name, kind, parameters, macs in _counted(model) if costs is None else map(_fields, costs):
        known = rows.get(name)
        if known is None:
            rows[name] = LayerReport(name, kind, None, None, None, None, parameters, macs)
        else:  # the parts of a parametrized layer, or of one inside torch.compile
            both = None if macs is None else macs + (known.macs or 0)
            rows[name] = replace(known, parameters=known.parameters + parameters, macs=both)
    for name, kind, total, kept in units:
        row = rows.get(name) or LayerReport(name, "(removed)", None, None, None, None, 0, None if costs is None else 0)
        changed: Mapping[str, Any] = {
            kind: (getattr(row, kind) or 0) + total,
            f"{kind}_kept": (getattr(row, f"{kind}_kept") or 0) + kept,
        }
        rows[name] = replace(row, **changed)
    return LayersReport(tuple(rows.values()), batch)


def _fields(cost: LayerCost) -> tuple[str, str, int, int | None]:
    return module_of(f"{cost.name}.") if cost.name else "", cost.type, cost.parameters, cost.macs


def _counted(model: nn.Module) -> Iterator[tuple[str, str, int, int | None]]:
    """Every module with parameters, without MACs; shared parameters count once."""
    seen = set[int]()
    for path, module in model.named_modules():
        own = {id(it): it.numel() for it in module.parameters(recurse=False) if id(it) not in seen}
        seen |= own.keys()
        if own:
            yield module_of(f"{path}.") if path else "", type(module).__name__, sum(own.values()), None


def _costs(rows: Sequence[LayerReport]) -> tuple[int, int | None]:
    macs = [it.macs for it in rows if it.macs is not None]
    return sum(it.parameters for it in rows), sum(macs) if macs else None


def _cells(row: LayerReport, kinds: Sequence[str], counts_macs: bool) -> tuple[str, ...]:
    cells = [row.name or "(model)", row.type]
    for kind in kinds:
        total, kept = getattr(row, kind), getattr(row, f"{kind}_kept")
        cells += ["-"] * 3 if total is None else [f"{total:,}", f"{kept:,}", percent(kept, total)]
    cells.append(f"{row.parameters:,}")
    return (*cells, "-" if row.macs is None else f"{row.macs:,}") if counts_macs else tuple(cells)


def draw_layers(report: LayersReport, path: Path) -> None:
    """Draw the units of every layer, before and now, beside its MACs."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - the extra keepk[plot]
    except ModuleNotFoundError as missing:
        raise KeepkError(f'report: {missing.name} is not installed. Run: pip install "keepk[plot]"') from None
    panels = [kind for kind in MARKS if any(getattr(it, kind) is not None for it in report)]
    rows = [it for it in report if it.macs or any(getattr(it, kind) is not None for kind in panels)]
    with_macs = any(it.macs for it in rows)
    if not rows:
        raise KeepkError("report: no layer has units of a space or MACs, so there is nothing to plot.")
    number = len(panels) + with_macs
    figure = Figure(figsize=(1.5 + 4 * number, 1.4 + 0.24 * len(rows)), layout="constrained")
    places, axes = range(len(rows)), figure.subplots(1, number, sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, panels, strict=False):
        totals, kept = ([getattr(it, name) or 0 for it in rows] for name in (kind, f"{kind}_kept"))
        axis.barh(places, totals, color=BEFORE, label="before")
        axis.barh(places, kept, color=MARKS[kind], label="kept")
        for place, total, left in zip(places, totals, kept, strict=True):
            if total:
                axis.annotate(f"{left:,}", (total, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
        axis.set_xlabel(kind)
        axis.margins(x=0.15)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1 + 0.5 / (1 + 0.24 * len(rows))), ncols=2, frameon=False)
    if with_macs:
        axes[-1].barh(places, [(it.macs or 0) / 1e6 for it in rows], color="#5d6b78")
        axes[-1].set_xlabel(f"million MACs now, {per_what(report.batch)}")
    axes[0].set_yticks(places, [it.name or "(model)" for it in rows], fontsize=8)
    axes[0].invert_yaxis()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # of matplotlib, about the ending
        raise KeepkError(f"report: {path}: {error}") from None
