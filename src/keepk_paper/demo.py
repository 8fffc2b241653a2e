"""The demo: train, prune, save, load and measure a small network, and repeat the parity experiment, in a minute.

Every number is computed during the run. The test set is used once, at the end.
"""

import copy
import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import keepk
from keepk.deploy.latency import LatencyReport, Spread
from keepk.errors import FileError, KeepkError
from keepk.model.costs import layer_costs
from keepk.rank.kth_largest import one_thread
from keepk.reports.run import SpaceReport
from keepk.reports.tables import EpochRecord, Table, whole
from keepk_paper.demo_parity import Setting, parity_points
from keepk_paper.digits import (
    CHANNELS,
    Digits,
    DigitsNet,
    Kept,
    Recipe,
    Record,
    accuracy,
    epochs_of,
    load_digits,
    prune,
    train_dense,
)
from keepk_paper.parity_training import draw
from keepk_paper.results import versions

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
        parity: The points of the parity figure, with the columns of `keepk paper run parity`.
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
            f"Parity, a small version of `keepk paper run parity`: hidden nodes that reach the noise floor of "
            f"{floor:.1f} %: "
            f"{annealed} if annealed; {from_the_start} if trained with that number from the start."
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
            _row("  of which not masked", before.parameters, self.kept.parameters),
            _row("MACs per image", before.macs, after.macs),
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


DENSE, SMALL = "dense", "small"
BATCHES = (1, 256)
Watch = Callable[[str, str], None]


def run(
    folder: Path,
    seed: int = 0,
    *,
    recipe: Recipe = Recipe(),  # noqa: B008 - a frozen value
    parity: Setting = Setting(),  # noqa: B008 - a frozen value
    watch: Watch = lambda _phase, _words: None,
) -> DemoReport:
    """Run the demo on the CPU.

    Args:
        folder: Where both networks are saved.
        seed: Seed of the weights, the batches and the parity data.
        recipe: Counts and epochs of the digit classifier.
        parity: The size of the parity experiment.
        watch: Called with the phase and a status at the end of every epoch.

    Returns:
        All measurements.
    """
    started, signs, digits = time.perf_counter(), draw(seed, sizes=parity.sizes), load_digits()
    history = list[EpochRecord]()

    def record(epoch: EpochRecord, words: str) -> None:
        history.append(epoch)
        watch(epoch.phase, f"{epoch.kept} channels, {words}, validation {epoch.accuracy:.2f} %")

    with torch.random.fork_rng(devices=[]), one_thread():  # the networks are too small for more
        torch.manual_seed(seed)
        dense, model, kept = trained(digits, recipe, record)
        keepk.save(dense, folder / DENSE)
        keepk.save(model, folder / SMALL)
        small = loaded(folder / SMALL, model, digits.validation.images)
        points = parity_points(signs, parity, seed=seed, watch=watch)
        return DemoReport(
            seed=seed,
            kept=kept,
            history=tuple(history),
            before=measured(dense, digits, folder / DENSE),
            after=measured(small, digits, folder / SMALL),
            val_error=_error(accuracy(small, digits.validation)),
            latency=keepk.latency(small, digits.train.images[:1], baseline=dense, batches=BATCHES, threads=1),
            parity=points,
            seconds=round(time.perf_counter() - started, 2),
        )


def trained(digits: Digits, recipe: Recipe, record: Record) -> tuple[DigitsNet, DigitsNet, Kept]:
    """Train and prune a network: a copy of the dense one, the pruned one, and the counts of kept units."""
    model = DigitsNet()
    train_dense(model, digits, recipe, record)
    dense = copy.deepcopy(model)
    return dense, model, prune(model, digits, recipe, record)


def loaded(folder: Path, model: nn.Module, images: Tensor) -> DigitsNet:
    """Load the saved network into a new one, and check that its outputs are bit-equal."""
    fresh = keepk.load(DigitsNet(), folder)
    with torch.no_grad():
        same = torch.equal(fresh.eval()(images), model.eval()(images))
    if not same:
        raise FileError(
            f"{folder}: the loaded network computes different outputs than the one in memory. Save it again."
        )
    return fresh


def measured(model: nn.Module, digits: Digits, folder: Path) -> Network:
    """The costs of a network, and its test error."""
    return Network(
        test_error=_error(accuracy(model, digits.test)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=sum(layer.macs for layer in layer_costs(model, digits.train.images[:1])),
        file_bytes=sum(file.stat().st_size for file in folder.iterdir()),
    )


def epochs_in_all(recipe: Recipe, parity: Setting) -> int:
    """The number of times that `watch` is called."""
    return epochs_of(recipe) + parity.epochs


def make_ready(folder: Path) -> None:
    """Check before training that every package is installed and that the folder can be written."""
    try:
        for package in ("sklearn", "matplotlib"):
            importlib.import_module(package)
    except ModuleNotFoundError as missing:
        raise KeepkError(f'keepk demo: {missing.name} is not installed. Run: pip install "keepk[demo]"') from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise KeepkError(f"keepk demo: cannot create the folder {folder} ({refused.strerror}). Give another.") from None
    if not os.access(folder, os.W_OK):
        raise KeepkError(f"keepk demo: cannot write into the folder {folder}. Give another.")


def save(report: DemoReport, folder: Path) -> tuple[Path, Path]:
    """Write the figure and the numbers as ``keepk-demo.png`` and ``keepk-demo.json``, and return their paths."""
    from keepk_paper.figures.demo import demo_figure  # noqa: PLC0415 - the extra keepk[demo]
    from keepk_paper.figures.panels import write_png  # noqa: PLC0415 - training needs no matplotlib

    picture, numbers = folder / "keepk-demo.png", folder / "keepk-demo.json"
    kept = report.kept
    figure = demo_figure(
        report.history,
        [*kept.channels, whole(kept.channels, "all channels"), whole(kept.head, "head weights")],
        report.parity,
        total=report.channels.total,
        title=report.headline,
        subtitle=_subtitle(report),
    )
    write_png(figure, picture)
    numbers.write_text(json.dumps(report.result(), indent=2) + "\n", encoding="utf-8")
    return picture, numbers


def _subtitle(report: DemoReport) -> str:
    sizes = " -> ".join(f"{network.file_bytes / KILO:,.0f} kB" for network in (report.before, report.after))
    fast = ", ".join(f"{row.ratio.median:.1f}x at batch {row.batch}" for row in report.latency.rows if row.ratio)
    return f"Handwritten digits, seed {report.seed}. Saved: {sizes}. Measured on one CPU thread, times as fast: {fast}."


def _error(accuracy_percent: float) -> float:
    return round(100 - accuracy_percent, 4)
