"""The demo's measurements as plain values, printed as one table."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from keepk.deploy.latency import LatencyReport, Spread
from keepk.paper.digits import CHANNELS, Kept
from keepk.paper.results import versions
from keepk.run.report import EpochRecord
from keepk.show.run_report import SpaceReport
from keepk.show.tables import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

KILO = 1_000


@dataclass(frozen=True)
class Network:
    """The costs of one network, and its test error.

    Attributes:
        test_error: In percent.
        parameters: The number of entries in its parameters.
        macs: Multiply-accumulates for one image.
        file_bytes: The size of ``model.safetensors`` and ``arch.json`` as written by `keepk.save`.
    """

    test_error: float
    parameters: int
    macs: int
    file_bytes: int


@dataclass(frozen=True)
class DemoReport:
    """The demo's measurements, with errors and accuracies in percent. All but the times are the same for the same seed.

    Attributes:
        kept: Requested and kept units, by space and by layer.
        history: One record per epoch.
        before: The dense network.
        after: The pruned network, as loaded from its files.
        latency: Both networks, measured in turns.
        parity: The points of the parity figure, with the columns of `keepk run parity`.
    """

    seed: int
    kept: Kept
    history: tuple[EpochRecord, ...]
    before: Network
    after: Network
    val_error: float
    latency: LatencyReport
    parity: tuple[dict[str, Any], ...]
    seconds: float

    @property
    def channels(self) -> SpaceReport:
        """The space of channels."""
        return next(space for space in self.kept.spaces if space.name == CHANNELS)

    @property
    def headline(self) -> str:
        """The result in one line."""
        return (
            f"{self.channels.kept} of {self.channels.total} channels, "
            f"{_times(self.before.macs, self.after.macs)} fewer MACs, "
            f"test error {self.before.test_error:.2f} % -> {self.after.test_error:.2f} %"
        )

    @property
    def parity_line(self) -> str:
        """The numbers of nodes with which the two recipes of the parity figure reach the noise floor."""
        annealed, from_the_start = map(self._at_floor, dict.fromkeys(point["recipe"] for point in self.parity))
        floor = self.parity[0]["noise_floor"]
        return (
            f"Parity, a small version of `keepk run parity`: hidden nodes that reach the noise floor of {floor:.1f} %: "
            f"{annealed} if annealed; {from_the_start} if that few from the start."
        )

    def result(self) -> dict[str, Any]:
        """All measurements as a dict, including the keys that every result file has."""
        channels = self.channels
        named = {
            "experiment": "digits",
            "recipe": "dsc-2 and dsc-1",
            "asked": channels.asked,
            "kept": channels.kept,
            "total": channels.total,
            "test_error": self.after.test_error,
            "dense_test_error": self.before.test_error,
        }
        layers = asdict(self.kept)
        return {**named, **asdict(self), "kept": channels.kept, "layers": layers, "versions": versions()}

    def table(self) -> Table:
        """The table of costs before and after pruning, with the requested counts."""
        before, after = self.before, self.after
        rows = [
            *(_row(it.name, it.total, it.kept, asked=f"{it.asked:,}") for it in self.kept.spaces),
            ("test error", f"{before.test_error:.2f}%", "", f"{after.test_error:.2f}%", ""),
            _row("parameters", before.parameters, after.parameters),
            _row("  of them not masked", before.parameters, self.kept.parameters),
            _row("MACs a picture", before.macs, after.macs),
            (
                "file size, kB",
                f"{before.file_bytes / KILO:,.1f}",
                "",
                f"{after.file_bytes / KILO:,.1f}",
                _times(before.file_bytes, after.file_bytes),
            ),
            *(_latency_row(row.batch, row.baseline, row.model, row.ratio) for row in self.latency.rows),
        ]
        return Table(("", "before", "asked", "after", "less"), tuple(rows))

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> "RichTable":
        return self.table().__rich__()

    def _at_floor(self, recipe: str) -> str:
        reached = [str(point["asked"]) for point in self.parity if point["recipe"] == recipe and point["at_floor"]]
        return ", ".join(reached) or "none"


def _row(name: str, before: int, after: int, *, asked: str = "") -> tuple[str, ...]:
    return name, f"{before:,}", asked, f"{after:,}", _times(before, after)


def _latency_row(batch: int, before: Spread | None, after: Spread, ratio: Spread | None) -> tuple[str, ...]:
    assert before is not None  # the demo measures against a baseline
    assert ratio is not None
    return f"ms for a batch of {batch}", before.cells()[0], "", after.cells()[0], f"{ratio.median:.1f}x"


def _times(before: float, after: float) -> str:
    """The ratio before / after.

    >>> _times(320, 32), _times(5, 2)
    ('10x', '2.5x')
    """
    ratio = before / after
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
