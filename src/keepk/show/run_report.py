"""`report`: where a run stands, as a table, as a line for a progress bar, and as plain values."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from keepk.errors import KeepkError
from keepk.graph.costs import model_costs, per_what
from keepk.plan.numbers import exact_number
from keepk.run.counting import count_masked
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
        kept: The units left now, counted on the tensors. Fewer than planned if channels or dead neurons
            were removed with their weights; more where pruned weights came back.
        asked: K, what is left at the end.
        fixed: How many channels its layers have besides, which cannot be removed and are in none of these counts.
    """

    name: str
    kind: str
    total: int
    planned: int
    kept: int
    asked: int
    fixed: int = 0


@dataclass(frozen=True)
class RunReport:
    """Where a run stands; prints itself, richly on a rich console.

    Attributes:
        epoch: Events behind us.
        epochs: Events of the plan.
        spaces: What is left of each space.
        parameters: Numbers in the model's parameters as they are, masked ones included.
        masked: How many of them are masked, and 0.0.
        macs: Multiply-accumulates (MACs) per sample of one forward pass with the tensors as they are, so masked weights
            are multiplied too; None if the Pruner has no example.
        batch: How many samples the Pruner's example has, by which its MACs were divided. None without an example, or if
            it could not be told; MACs are of the whole example then.
        error: What the user says, in percent.

    Parameters and MACs follow one convention: they count tensors as they are, as `keepk.inspect` does. What masks alone
    have saved is in `masked`; removing channels, or `keepk.compact`, makes parameters and MACs fewer.
    """

    epoch: int
    epochs: int
    spaces: tuple[SpaceReport, ...]
    parameters: int
    masked: int
    macs: int | None
    batch: int | None
    error: float | None

    @property
    def line(self) -> str:
        """All of it in a line, such as a progress bar has room for."""
        kept = ", ".join(f"{space.name} {space.kept:,} of {space.total:,}{_beside(space)}" for space in self.spaces)
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
        counted = "parameters include" if self.macs is None else "parameters and MACs include"
        macs = "" if self.macs is None else f", MACs are {per_what(self.batch)}"
        return f"After epoch {self.epoch} of {self.epochs}; {counted} masked entries{macs}"

    def _costs(self) -> str:
        masked = f" ({self.masked:,} masked)" if self.masked else ""
        macs = "" if self.macs is None else f", {self.macs:,} MACs {per_what(self.batch)}"
        error = "" if self.error is None else f", error {self.error:.2f} %"
        return f"{self.parameters:,} parameters{masked}{macs}{error}"

    def _table(self) -> Table:
        any_fixed = any(space.fixed for space in self.spaces)
        rows = tuple(
            (
                space.name,
                space.kind,
                f"{space.total:,}",
                f"{space.planned:,}",
                f"{space.kept:,}",
                percent(space.kept, space.total),
                f"{space.asked:,}",
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
            *(["not counted"] if any_fixed else []),
        )
        return Table(columns, rows)


def _beside(space: SpaceReport) -> str:
    return f" (and {space.fixed:,} fixed)" if space.fixed else ""


def report(pruner: Pruner, *, error: float | None = None) -> RunReport:
    """Where a run stands: per space what is planned, kept and asked for; parameters and multiply-accumulates now.

    All of it is counted on the model's tensors. A `KeepkWarning` has both numbers where pruned units came back.

    Args:
        pruner: The run. Multiply-accumulates are counted if it has an example.
        error: An error in percent to show beside it.

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
    >>> report(pruner, error=1.5).line
    'epoch 1/2: kept 0 4 of 6; 51 parameters, 44 MACs per sample, error 1.50 %'
    """
    if not isinstance(pruner, Pruner):
        raise KeepkError(f"report: got {type(pruner).__name__}. Give the keepk.Pruner of the run.")
    if error is not None:
        error = float(exact_number(error, "report: error", KeepkError))
    plan, epoch = pruner.plan, pruner.epoch
    spaces = tuple(
        SpaceReport(
            name,
            space["kind"],
            space["total"],
            plan[name][epoch - 1] if epoch else space["total"],
            space["alive"] if "alive" in space else space["kept"],
            space["asked"],
            space.get("fixed", 0),
        )
        for name, space in pruner.counted_certificate("report").items()
    )
    parameters, masked = sum(it.numel() for it in pruner.model.parameters()), count_masked(pruner.masks, pruner.model)
    costs = None if pruner.example is None else model_costs(pruner.model, pruner.example)
    macs, batch = (None, None) if costs is None else (costs.macs, costs.batch)
    return RunReport(epoch, pruner.epochs, spaces, parameters, masked, macs, batch, error)
