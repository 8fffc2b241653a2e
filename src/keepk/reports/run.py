"""`report`: a summary of a run, as a table, as a line for a progress bar, and as plain values."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from keepk.errors import KeepkError
from keepk.model.costs import model_costs, per_what
from keepk.plan.numbers import exact_number
from keepk.reports.layers import NO_LAYERS, LayersReport, layers_report
from keepk.reports.tables import Table, html_table, percent
from keepk.run.pruner import Pruner

if TYPE_CHECKING:
    from rich.console import Group

SHOWN = 20  # spaces in a repr: with its other lines it fits on a terminal of 24 lines


@dataclass(frozen=True)
class SpaceReport:
    """The counts of one space of a run.

    Attributes:
        name: The name of the space.
        kind: "weights" or "channels".
        total: M, the units before the first event.
        planned: M_e, the plan's count after the last event; with a budget, the units that this event kept.
        kept: The units left now, counted in the tensors. Fewer than planned if channels or dead neurons were removed
            with their weights; more if pruned weights are no longer zero.
        asked: K, the number of units to keep; None with a budget.
        fixed: Channels of the same layers that cannot be removed; no other count includes them.
        implied: With a budget, the number of units at the end if later events ranked as the present one; None without
            a budget, or if the units cannot be ranked now.
    """

    name: str
    kind: str
    total: int
    planned: int
    kept: int
    asked: int | None
    fixed: int = 0
    implied: int | None = None


@dataclass(frozen=True)
class BudgetReport:
    """A budget of a run. Masked channels count as removed.

    Attributes:
        name: Its name in the plan.
        cost: "macs", per sample, or "parameters".
        spaces: The spaces that are cut to meet it.
        dense: The cost of the model given to the Pruner.
        planned: The bound after the last event.
        asked: The bound at the end.
        reached: The cost after the last event.
    """

    name: str
    cost: str
    spaces: tuple[str, ...]
    dense: int
    planned: int
    asked: int
    reached: int


@dataclass(frozen=True, repr=False)
class RunReport:
    """A summary of a run. It prints as a table, in color on a rich console, and as HTML in a notebook.

    Attributes:
        epoch: The number of events so far.
        epochs: The number of events in the plan.
        spaces: The counts of each space.
        parameters: The number of entries of the model's parameters, including masked ones.
        masked: The number of entries that are masked and 0.0.
        macs: Multiply-accumulates (MACs) per sample of one forward pass with the tensors as they are, so masked weights
            are multiplied too; None if the Pruner has no example.
        batch: The batch size of the Pruner's example, by which MACs were divided. None without an example, or if the
            batch size could not be determined; MACs are then those of the whole example.
        error: The error that the user passed, in percent.
        budgets: The budgets of the run.
        layers: The units, parameters and MACs of every layer, before and now: iterate over it, print it as a table, or
            call its ``plot``.

    Parameters and MACs count tensors as they are, as `keepk.inspect` does. Weights that are only masked are counted in
    `masked`; removing channels, or `keepk.compact`, lowers parameters and MACs.
    """

    epoch: int
    epochs: int
    spaces: tuple[SpaceReport, ...]
    parameters: int
    masked: int
    macs: int | None
    batch: int | None
    error: float | None
    budgets: tuple[BudgetReport, ...] = ()
    layers: LayersReport = NO_LAYERS

    @property
    def line(self) -> str:
        """The report as one line, for a progress bar."""
        kept = ", ".join(
            f"{space.name} {space.kept:,} of {space.total:,}{f' (and {space.fixed:,} fixed)' * bool(space.fixed)}"
            for space in self.spaces
        )
        return f"epoch {self.epoch}/{self.epochs}: kept {kept}; {self._costs()}"

    def data(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers, which survive a round trip through JSON."""
        spaces = [asdict(space) for space in self.spaces]
        for space in (it for it in spaces if it["asked"] is not None):
            del space["implied"]  # only budgets imply a count
        budgets = [{**asdict(it), "spaces": list(it.spaces)} for it in self.budgets]
        return {**asdict(self), "spaces": spaces, "budgets": budgets, "layers": self.layers.data()}

    def flat(self, prefix: str = "keepk/") -> dict[str, float]:
        """The event, the units kept per space, parameters and MACs as one flat dict, as loggers of metrics take it.

        >>> import torch, keepk
        >>> pruner = Pruner(torch.nn.Linear(10, 10), keepk.weights("weight", keep=25), example=torch.zeros(2, 10))
        >>> pruner.step()
        >>> report(pruner).flat()
        {'keepk/event': 1, 'keepk/kept/weight': 25, 'keepk/parameters': 110, 'keepk/macs': 100}
        """
        kept = {f"{prefix}kept/{space.name}": space.kept for space in self.spaces}
        macs = {} if self.macs is None else {f"{prefix}macs": self.macs}
        return {f"{prefix}event": self.epoch, **kept, f"{prefix}parameters": self.parameters, **macs}

    def __str__(self) -> str:
        return f"{self._title()}\n{self._table()}\n{self._costs()}"

    def __repr__(self) -> str:
        """The printed report, without the middle rows if there are many spaces."""
        lines = str(self).splitlines()
        rows = lines[3:-1]  # after the title and the table's head, before the costs
        if len(rows) > SHOWN:
            rows = [*rows[: SHOWN // 2], f"... {len(rows) - SHOWN} more spaces ...", *rows[-SHOWN // 2 :]]
        return "\n".join([*lines[:3], *rows, lines[-1]])

    def _repr_html_(self) -> str:
        table = self._table()
        return f"<p>{self._title()}</p>{html_table(table.columns, table.rows)}<p>{self._costs()}</p>"

    def __rich__(self) -> "Group":
        from rich.console import Group  # noqa: PLC0415 - only a rich console calls this
        from rich.text import Text  # noqa: PLC0415 - only a rich console calls this

        return Group(Text(self._title(), style="bold"), self._table(), Text(self._costs()))

    def _title(self) -> str:
        counted = "parameters include" if self.macs is None else "parameters and MACs include"
        macs = "" if self.macs is None else f", MACs are {per_what(self.batch)}"
        return f"After epoch {self.epoch} of {self.epochs}; {counted} masked entries{macs}"

    def _costs(self) -> str:
        masked = f" ({self.masked:,} masked)" if self.masked else ""
        macs = "" if self.macs is None else f", {self.macs:,} MACs {per_what(self.batch)}"
        error = "" if self.error is None else f", error {self.error:.2f} %"
        budgets = "".join(f"; {self._budget(it)}" for it in self.budgets)
        return f"{self.parameters:,} parameters{masked}{macs}{error}{budgets}"

    def _budget(self, budget: BudgetReport) -> str:
        unit = f"MACs {per_what(self.batch)}" if budget.cost == "macs" else "parameters"
        later = "" if budget.planned == budget.asked else f", {budget.asked:,} at the end"
        return f"budget {budget.reached:,} of at most {budget.planned:,}{later} ({budget.dense:,} {unit} at first)"

    def _table(self) -> Table:
        any_fixed = any(space.fixed for space in self.spaces)
        any_budget = bool(self.budgets)
        rows = tuple(
            (
                space.name,
                space.kind,
                f"{space.total:,}",
                f"{space.planned:,}",
                f"{space.kept:,}",
                percent(space.kept, space.total),
                "-" if space.asked is None else f"{space.asked:,}",
                *(["-" if space.implied is None else f"{space.implied:,}"] if any_budget else []),
                *([f"{space.fixed:,}"] if any_fixed else []),
            )
            for space in self.spaces
        )
        columns = (
            "space",
            "kind",
            "total",
            "planned",
            "kept",
            "kept %",
            "asked",
            *(["implied"] if any_budget else []),
            *(["not counted"] if any_fixed else []),
        )
        return Table(columns, rows)


def report(pruner: Pruner, *, error: float | None = None) -> RunReport:
    """A summary of a run: planned, kept and requested units per space, parameters and multiply-accumulates.

    The same as ``pruner.report()``. All numbers are counted in the model's tensors; if pruned units are no longer zero,
    a `KeepkWarning` reports both counts.

    Args:
        pruner: The `Pruner` of the run. Multiply-accumulates are counted if it has an example.
        error: An error in percent to show in the report.

    Returns:
        A `RunReport`. It prints as a table; ``.line`` fits a progress bar, ``.data()`` returns plain values.

    Raises:
        KeepkError: `pruner` is not a `Pruner`, or `error` is not a number.

    >>> import torch, keepk
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> pruner = keepk.Pruner(net, [keepk.channels("0", keep=2, schedule=[4, 2])], example=torch.zeros(2, 8))
    >>> pruner.step()
    >>> print(report(pruner))
    After epoch 1 of 2; parameters and MACs include masked entries, MACs are per sample
    space      kind  total  planned  kept  kept %  asked
    -----  --------  -----  -------  ----  ------  -----
    0      channels      6        4     4  66.67%      2
    51 parameters, 44 MACs per sample
    >>> print(report(pruner).layers)
    Layers now; kept counts leave out masked units, parameters and MACs include masked entries, MACs are per sample
    layer      type  channels  kept  kept %  parameters  MACs
    -----  --------  --------  ----  ------  ----------  ----
    0        Linear         6     4  66.67%          36    32
    2        Linear         -     -       -          15    12
    -----  --------  --------  ----  ------  ----------  ----
    total  2 layers         -     -       -          51    44
    >>> report(pruner, error=1.5).line
    'epoch 1/2: kept 0 4 of 6; 51 parameters, 44 MACs per sample, error 1.50 %'
    """
    if not isinstance(pruner, Pruner):
        raise KeepkError(f"report: got {type(pruner).__name__}. Pass the keepk.Pruner of the run.")
    if error is not None:
        error = float(exact_number(error, "report: error", KeepkError))
    plan, epoch, implied = pruner.plan, pruner.epoch, _implied(pruner)
    spaces = tuple(
        SpaceReport(
            name,
            space["kind"],
            space["total"],
            space["kept"] if "budget" in space else plan[name][epoch - 1] if epoch else space["total"],
            space["alive"] if "alive" in space else space["kept"],
            None if "budget" in space else space["asked"],
            space.get("fixed", 0),
            implied.get(name),
        )
        for name, space in pruner.counted_certificate("report").items()
    )
    budgets = tuple(BudgetReport(name, **it | {"spaces": tuple(it["spaces"])}) for name, it in pruner.budgets.items())
    # Counted on a copy without weights wherever the model allows it, so a report is cheap enough for every epoch.
    parameters, masked = sum(it.numel() for it in pruner.model.parameters()), pruner.counted_masked()
    plain = None if pruner.example is None else pruner.plain_model
    costs = None if plain is None else model_costs(plain, pruner.example)
    macs, batch = (None, None) if costs is None else (costs.macs, costs.batch)
    layers = layers_report(pruner.model, pruner.counted_layers(), None if costs is None else costs.layers, batch)
    return RunReport(epoch, pruner.epochs, spaces, parameters, masked, macs, batch, error, budgets, layers)


def _implied(pruner: Pruner) -> dict[str, int]:
    """By space with a budget, the units at the end if later events ranked as the present one."""
    if not pruner.ranks_alone:  # a report does not communicate, so that one process alone can print it
        return {}
    try:
        return {name: counts[-1] for name, counts in pruner.implied.items()}
    except KeepkError:  # a metric has seen no data since the last event, or the model was cut elsewhere
        return {}
