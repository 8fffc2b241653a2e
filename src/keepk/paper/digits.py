"""The demo: a small LeNet-300-100 on scikit-learn's handwritten digits, pruned to exactly K weights.

1,797 pictures of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. `prune` is the example of use. The
recipe was chosen on the validation part; the test part is read at the last epoch.
"""

import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepk
from keepk.errors import KeepkError
from keepk.paper.data import Split
from keepk.paper.results import versions
from keepk.rank.pieces import one_thread
from keepk.run.report import EpochRecord, LayerCount, layer_counts, whole

SCHEDULE = keepk.Annealing(p0=0.9, n1=10, nu=0.005)
Watch = Callable[[EpochRecord], None]


@dataclass(frozen=True)
class Recipe:
    """What the demo does; epochs are counted as passes over the training part."""

    keep: int = 1_000
    dense_epochs: int = 30
    fine_tune_epochs: int = 30
    schedule: keepk.Annealing = SCHEDULE
    dense_rate: float = 0.1
    dense_decay: float = 1e-4
    pruning_rate: float = 0.05
    pruning_decay: float = 1e-3
    batch: int = 32


@dataclass(frozen=True, eq=False)
class Digits:
    """The pictures in three parts, cut once and for all: 1,097 to train, 300 to validate, 400 to test."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured; errors and accuracies in percent."""

    seed: int
    asked: int
    kept: int
    total: int
    layers: tuple[LayerCount, ...]
    history: tuple[EpochRecord, ...]
    dense_test_error: float
    test_error: float
    val_error: float
    seconds: float

    @property
    def headline(self) -> str:
        """The result in one line."""
        return (
            f"{self.kept:,} of {self.total:,} weights kept, "
            f"test error {self.dense_test_error:.2f} % -> {self.test_error:.2f} %"
        )


class LeNet(nn.Module):
    """64 - 300 - 100 - 10: LeNet-300-100 for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, 10]."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(images)))))  # type: ignore[no-any-return]


def train_dense(model: nn.Module, digits: Digits, recipe: Recipe, watch: Watch) -> None:
    """Ordinary training from scratch, before any pruning."""
    optimizer = _sgd(model, recipe.dense_rate, recipe.dense_decay)
    total = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(recipe.dense_epochs):
        train_one_epoch(model, digits.train, optimizer, recipe.batch)
        watch(EpochRecord("dense", total, accuracy(model, digits.validation)))


def prune(model: nn.Module, digits: Digits, recipe: Recipe, watch: Watch) -> dict[str, Tensor]:
    """DSC-1 down to exactly K weights, then fine-tuning with the masks held. Returns which weights are kept."""
    optimizer = _sgd(model, recipe.pruning_rate, recipe.pruning_decay)
    space = keepk.weights("*", keep=recipe.keep, name="all", schedule=recipe.schedule)

    with keepk.Pruner(model, [space], optimizer) as pruner:
        for epoch in range(pruner.epochs + recipe.fine_tune_epochs):
            train_one_epoch(model, digits.train, optimizer, recipe.batch)
            pruner.step()  # keeps exactly as many as the plan says; after the plan it only holds them

            phase = "anneal" if epoch < pruner.epochs else "fine-tune"
            watch(EpochRecord(phase, pruner.kept["all"], accuracy(model, digits.validation)))
        return pruner.masks


def train_one_epoch(model: nn.Module, split: Split, optimizer: torch.optim.Optimizer, batch: int) -> None:
    """One pass over the pictures in a new random order."""
    for chosen in torch.split(torch.randperm(len(split.labels)), batch):
        loss = F.cross_entropy(model(split.images[chosen]), split.labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """The share of pictures that are recognised, in percent."""
    right = model(split.images).argmax(dim=1) == split.labels
    return 100 * int(right.sum()) / len(split.labels)


def run(seed: int = 0, *, recipe: Recipe = Recipe(), watch: Watch = lambda _: None) -> DemoReport:  # noqa: B008 - a frozen value
    """The whole demo on the CPU; the same seed gives the same numbers. `watch` sees the end of every epoch."""
    digits = load_digits()
    history, started = list[EpochRecord](), time.perf_counter()

    def record(epoch: EpochRecord) -> None:
        history.append(epoch)
        watch(epoch)

    with torch.random.fork_rng(devices=[]), one_thread():  # threads gain nothing here
        torch.manual_seed(seed)
        model = LeNet()
        train_dense(model, digits, recipe, record)
        dense_accuracy = accuracy(model, digits.test)
        masks = prune(model, digits, recipe, record)
        pruned_accuracy = accuracy(model, digits.test)
    layers = layer_counts(masks)
    network = whole(layers)
    return DemoReport(
        seed=seed,
        asked=recipe.keep,
        kept=network.kept,
        total=network.total,
        layers=tuple(layers),
        history=tuple(history),
        dense_test_error=_error(dense_accuracy),
        test_error=_error(pruned_accuracy),
        val_error=_error(history[-1].accuracy),
        seconds=round(time.perf_counter() - started, 2),
    )


def epochs_of(recipe: Recipe) -> int:
    """How many epochs the demo trains in all."""
    total = sum(parameter.numel() for parameter in LeNet().parameters())
    return recipe.dense_epochs + len(recipe.schedule(total, recipe.keep, None)) + recipe.fine_tune_epochs


def load_digits() -> Digits:
    """Scikit-learn's digits, split the same way whatever the seed."""
    from sklearn import datasets  # noqa: PLC0415 - the extra keepk[demo]

    images, labels = datasets.load_digits(return_X_y=True)
    pictures, classes = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    return Digits(*(Split(pictures[part], classes[part]) for part in torch.split(order, [1097, 300, 400])))


def make_ready(folder: Path) -> None:
    """Refuse before the training what would fail after it: a missing package, a folder that cannot be made."""
    try:
        for package in ("sklearn", "matplotlib"):
            importlib.import_module(package)
    except ModuleNotFoundError as missing:
        raise KeepkError(f'keepk demo: {missing.name} is not installed. Run: pip install "keepk[demo]"') from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise KeepkError(f"keepk demo: cannot make the folder {folder} ({refused.strerror}). Give another.") from None
    if not os.access(folder, os.W_OK):
        raise KeepkError(f"keepk demo: cannot write into the folder {folder}. Give another.")


def save(report: DemoReport, folder: Path) -> tuple[Path, Path]:
    """The picture and the numbers, as ``keepk-demo.png`` and ``keepk-demo.json``; returns the two paths."""
    from keepk.show.plots import pruning_figure, write_png  # noqa: PLC0415 - the extra keepk[demo]

    picture, numbers = folder / "keepk-demo.png", folder / "keepk-demo.json"
    about = f"64-300-100-10 network, handwritten digits, 400 test pictures, seed {report.seed}."
    figure = pruning_figure(
        report.history,
        report.layers,
        whole=whole(report.layers, "all"),
        title=report.headline,
        subtitle=f"{about} Asked to keep {report.asked:,}; kept {report.kept:,}.",
    )
    write_png(figure, picture)
    numbers.write_text(json.dumps(_result(report), indent=2) + "\n", encoding="utf-8")
    return picture, numbers


def _result(report: DemoReport) -> dict[str, Any]:
    return {"experiment": "digits", "recipe": "dsc-1", **asdict(report), "versions": versions()}


def _sgd(model: nn.Module, rate: float, decay: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)


def _error(accuracy_percent: float) -> float:
    return round(100 - accuracy_percent, 4)
