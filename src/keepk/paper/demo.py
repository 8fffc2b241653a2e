"""The demo: train, prune, save, load and measure a small network, and repeat the parity experiment, in a minute.

Every number is computed during the run. The test set is used once, at the end.
"""

import copy
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import keepk
from keepk.errors import FileError, KeepkError
from keepk.graph.costs import layer_costs
from keepk.paper.demo_parity import Setting, parity_points
from keepk.paper.demo_report import KILO, DemoReport, Network
from keepk.paper.digits import (
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
from keepk.paper.parity_data import draw
from keepk.rank.pieces import one_thread
from keepk.run.report import EpochRecord, whole

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
    """Check before training for errors that would occur after it: missing packages, an unwritable folder."""
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
    from keepk.show.demo_plot import demo_figure  # noqa: PLC0415 - the extra keepk[demo]
    from keepk.show.plots import write_png  # noqa: PLC0415

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
