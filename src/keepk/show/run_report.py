"""`report`: where a run stands, as a table, as a line for a progress bar, and as plain values."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from keepk.errors import KeepkError
from keepk.graph.costs import layer_costs
from keepk.plan.numbers import exact_number
from keepk.run.pruner import Pruner
from keepk.show.tables import Table, percent

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class SpaceReport:
    """One space of a run.

    Attributes:
        name: Its name.
        kind: "weights" or "channels".
        total: M, the units in the beginning.
        planned: M_e, what the plan has for now.
        kept: What is left now. Fewer than planned where channels took weights along, or dead neurons were swept.
        asked: K, what is left at the end.
    """

    name: str
    kind: str
    total: int
    planned: int
    kept: int
    asked: int


@dataclass(frozen=True)
class RunReport:
    """Where a run stands; prints itself, richly on a rich console.

    Attributes:
        epoch: Events behind us.
        epochs: Events of the plan.
        spaces: What is left of each space.
        parameters: Numbers in the model's parameters that are not masked.
        macs: Multiply-accumulates of one forward pass with the Pruner's example; None if it has none.
        error: What the user says, in percent.
    """

    epoch: int
    epochs: int
    spaces: tuple[SpaceReport, ...]
    parameters: int
    macs: int | None
    error: float | None

    @property
    def line(self) -> str:
        """All of it in a line, such as a progress bar has room for."""
        kept = ", ".join(f"{space.name} {space.kept:,} of {space.total:,}" for space in self.spaces)
        return f"epoch {self.epoch}/{self.epochs}: kept {kept}; {self._costs()}"

    def data(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, words and numbers: what JSON gives back."""
        return {**asdict(self), "spaces": [asdict(space) for space in self.spaces]}

    def __str__(self) -> str:
        return f"{self._title()}\n{self._table()}\n{self._costs()}"

    def __rich__(self) -> "Group":
        from rich.console import Group  # noqa: PLC0415 - only a rich console calls this
        from rich.text import Text  # noqa: PLC0415

        return Group(Text(self._title(), style="bold"), self._table(), Text(self._costs()))

    def _title(self) -> str:
        return f"After epoch {self.epoch} of {self.epochs}"

    def _costs(self) -> str:
        macs = "" if self.macs is None else f", {self.macs:,} MACs"
        error = "" if self.error is None else f", error {self.error:.2f} %"
        return f"{self.parameters:,} parameters{macs}{error}"

    def _table(self) -> Table:
        rows = tuple(
            (
                space.name,
                space.kind,
                f"{space.total:,}",
                f"{space.planned:,}",
                f"{space.kept:,}",
                percent(space.kept, space.total),
                f"{space.asked:,}",
            )
            for space in self.spaces
        )
        return Table(("space", "kind", "total", "planned", "kept", "kept %", "asked"), rows)


def report(pruner: Pruner, *, error: float | None = None) -> RunReport:
    """Where a run stands: per space what is planned, kept and asked for; parameters and multiply-accumulates now.

    Args:
        pruner: The run. Multiply-accumulates are counted if it has an example.
        error: An error in percent to show beside it.

    >>> import torch, keepk
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> pruner = keepk.Pruner(net, [keepk.channels("0", keep=2, schedule=[4, 2])], example=torch.zeros(1, 8))
    >>> pruner.step()
    >>> print(report(pruner))
    After epoch 1 of 2
    space      kind  total  planned  kept  kept %  asked
    -----  --------  -----  -------  ----  ------  -----
    0      channels      6        4     4  66.67%      2
    51 parameters, 44 MACs
    >>> report(pruner, error=1.5).line
    'epoch 1/2: kept 0 4 of 6; 51 parameters, 44 MACs, error 1.50 %'
    """
    if not isinstance(pruner, Pruner):
        raise KeepkError(f"report: got {type(pruner).__name__}. Give the keepk.Pruner of the run.")
    if error is not None:
        error = float(exact_number(error, "report: error", KeepkError))
    plan, epoch, kept = pruner.plan, pruner.epoch, pruner.kept
    spaces = tuple(
        SpaceReport(
            name,
            space["kind"],
            space["total"],
            plan[name][epoch - 1] if epoch else space["total"],
            kept[name],
            space["asked"],
        )
        for name, space in pruner.certificate.items()
    )
    masked = sum(int((~mask).sum()) for mask in pruner.masks.values())
    parameters = sum(parameter.numel() for parameter in pruner.model.parameters()) - masked
    macs = None
    if pruner.example is not None:
        macs = sum(layer.macs for layer in layer_costs(pruner.model, pruner.example))
    return RunReport(epoch, pruner.epochs, spaces, parameters, macs, error)
