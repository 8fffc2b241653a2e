"""The result of `keepk.fit`: the spaces with their budget, and the curve of latencies that led to it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepk.deploy.latency import Spread
from keepk.errors import KeepkError
from keepk.plan.budgets import Budget
from keepk.plan.spaces import ChannelSpace
from keepk.reports.tables import Table, percent

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class FitPoint:
    """A model that was measured, next to the dense one.

    Attributes:
        macs: Its multiply-accumulates per sample.
        share: The same as a share of the dense model's.
        kept: By space, how many channels it has.
        ms: The quartiles of its times, in milliseconds.
        dense_ms: Those of the dense model, which took turns with it.
    """

    macs: int
    share: float
    kept: dict[str, int]
    ms: Spread
    dense_ms: Spread


@dataclass(frozen=True, repr=False)
class Fit:
    """The largest model that was found to meet a latency. It prints as a table.

    Attributes:
        spaces: The spaces with a budget in MACs, for a `Pruner`. Several spaces share it.
        macs: The budget: the multiply-accumulates per sample of the chosen model.
        latency_ms: The latency that was asked for.
        curve: All models that were measured, the largest first.
        confirmed: The quartiles of the chosen model's times in a fresh process, in milliseconds; None if the model
            could not be sent there.
        runtime: ``"torch"`` or ``"onnxruntime"``.
        batch: The batch size.
        threads: How many threads an operation could use.
        repeats: How often each model was measured.
        notes: What to know about the result, such as noise.
    """

    spaces: tuple[ChannelSpace, ...]
    macs: int
    latency_ms: float
    curve: tuple[FitPoint, ...]
    confirmed: Spread | None
    runtime: str
    batch: int
    threads: int
    repeats: int
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> FitPoint:
        """The point of the curve whose MACs are the budget."""
        return next(it for it in self.curve if it.macs == self.macs)

    def data(self) -> dict[str, Any]:
        """All attributes but the spaces, as plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(json.dumps({**asdict(self), "spaces": [it.name for it in self.spaces]}))
        return plain

    def table(self) -> Table:
        """A table with one row per measured model."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        title = (
            f"At most {self.latency_ms:g} ms with {self.runtime}, batch {self.batch}, {threads}; medians and quartiles "
            f"of {self.repeats}, MACs are per sample"
        )
        rows = tuple(
            (
                f"{it.macs:,}",
                percent(it.macs, self.curve[0].macs),
                f"{sum(it.kept.values()):,}",
                *it.ms.cells(),
                f"{it.dense_ms.median:.3g}",
                ("chosen" if it is self.chosen else "yes") if it.ms.median <= self.latency_ms else "no",
            )
            for it in self.curve
        )
        return Table(("MACs", "share", "channels", "ms", "quartiles", "dense ms", "meets it"), rows, title)

    def plot(self, path: str | Path) -> None:
        """Draw latency over MACs, with quartiles and the latency that was asked for, and save it.

        Args:
            path: The file; its ending says the format, such as ``.png`` or ``.svg``.

        Raises:
            KeepkError: matplotlib is not installed, or the format is unknown.
        """
        draw_fit(self, Path(path))

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *self._lines()])

    def __repr__(self) -> str:
        return str(self)  # shorter than the fields, and what an interactive session should show

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + "".join(f"<p>{line}</p>" for line in self._lines())

    def __rich__(self) -> "Group":
        from rich.console import Group  # noqa: PLC0415 - only a rich console calls this
        from rich.text import Text  # noqa: PLC0415 - only a rich console calls this

        return Group(self.table().__rich__(), *map(Text, self._lines()))

    def _lines(self) -> Sequence[str]:
        confirmed = "not confirmed in a fresh process"
        if self.confirmed is not None:
            confirmed = f"{self.confirmed.median:.3g} ms in a fresh process"
        return [f"macs={self.macs:,}: {self.chosen.ms.median:.3g} ms, {confirmed}", *self.notes]


def with_budget(spaces: Sequence[ChannelSpace], macs: int) -> tuple[ChannelSpace, ...]:
    """The spaces with a budget of `macs`, which they share if there are several."""
    return tuple(replace(it, budget=Budget("macs", macs, shared=len(spaces) > 1)) for it in spaces)


def draw_fit(fit: Fit, path: Path) -> None:
    """Draw the curve of a fit."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - the extra keepk[plot]
    except ModuleNotFoundError as missing:
        raise KeepkError(f'fit: {missing.name} is not installed. Run: pip install "keepk[plot]"') from None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    macs = [it.macs / 1e6 for it in fit.curve]
    spreads = [it.ms for it in fit.curve]
    axis.fill_between(
        macs, [it.lower for it in spreads], [it.upper for it in spreads], color="#c9d8e6", label="quartiles"
    )
    axis.plot(macs, [it.median for it in spreads], "o-", color="#2f6f9f", markersize=4, label="median")
    axis.axhline(fit.latency_ms, color="#8a3b2f", linestyle="--", label=f"{fit.latency_ms:g} ms")
    axis.plot([fit.macs / 1e6], [fit.chosen.ms.median], "o", color="#b8742a", markersize=9, label="chosen", zorder=3)
    axis.set_xlabel("million MACs per sample")
    axis.set_ylabel(f"ms per batch of {fit.batch}, {fit.runtime}")
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # of matplotlib, about the ending
        raise KeepkError(f"fit: {path}: {error}") from None
