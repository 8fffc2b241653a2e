"""The default metric: accuracy at equal MACs, for metrics that read weights alone, beside Taylor and random scores.

    python benchmarks/default_metric.py --out results/benchmarks/default_metric.json

Three networks with BatchNorm: the demo's on scikit-learn's digits, VGG-16 at a quarter of its width on the first 10,000
training pictures of CIFAR-10 (both are trained first, once per seed), and CREPE with its published weights
(`examples/prune_crepe.py`). Copies are cut to a half and a quarter of the MACs at once, without a floor and with
`layer_floor=0.1`. Errors in percent are measured right after the cut, after BatchNorm statistics are recomputed, and,
at a quarter of the MACs with the floor, after a short training with the same batches for every metric. They are those
of the validation set, or of CREPE's synthesised test frames.

Every line is written as soon as it is known. A run that was stopped goes on where it was; `--folder` has the trained
networks. The default of `metric=` is decided from these numbers.
"""

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepk
from keepk.metrics.layers import Layer
from keepk.model.costs import model_costs
from keepk_paper.digits import DigitsNet, Recipe, load_digits, train_dense
from keepk_paper.models import VGG16
from keepk_paper.pictures import cifar10
from keepk_paper.results import versions

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import prune_crepe as crepe

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RanksInLayer:
    """A metric whose scores are replaced by their ranks in the layer, as shares: all layers lose the same share."""

    of: Callable[..., Tensor]
    over = "layer"
    ranks = ("channels",)
    needs = ("weights",)

    def __call__(self, layer: Layer) -> Tensor:
        """The shares of the layer's channels that score lower."""
        return self.of(layer).double().argsort().argsort() / len(layer)

    def scores(self, layers: Sequence[Layer]) -> list[Tensor]:
        """The same for all layers of a space."""
        return [self(layer) for layer in layers]


SHARES, FLOORS = (0.5, 0.25), (1, 0.1)
TUNED = (0.25, 0.1)  # the share and the floor of the networks that are trained after the cut
CALIBRATION = 8  # batches; 4 of CREPE
PICTURES, VALIDATION = 10_000, 1_000
METRICS: dict[str, Callable[..., Any]] = {
    "gamma": keepk.metrics.blend(alpha=1.0),
    "blend": keepk.metrics.blend(alpha=0.5),
    "gamma, per layer": keepk.metrics.blend(alpha=1.0, over="layer"),
    "product": keepk.metrics.product,
    "gamma, ranks in layer": RanksInLayer(keepk.metrics.bn_scale),
    "product, ranks in layer": RanksInLayer(keepk.metrics.product),
    "taylor": keepk.metrics.taylor,
    "random": keepk.metrics.random,
}


@dataclass(frozen=True)
class Subject:
    """A trained network with everything that pruning it needs.

    Attributes:
        dense: The network.
        select: Its layers with BatchNorms, whose channels are ranked.
        batches: Inputs and targets for statistics of gradients and of BatchNorms.
        loss: The loss of a batch.
        error: The error of a network in percent.
        train: Trains a network for a short time.
    """

    dense: nn.Module
    select: str
    batches: list[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    error: Callable[[nn.Module], float]
    train: Callable[[nn.Module], None]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the classifiers."""
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def share_of_errors(images: Tensor, labels: Tensor, model: nn.Module) -> float:
    """The error of a classifier in percent."""
    model.eval()
    parts = zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
    return round(100 * sum(int(model(x).argmax(1).ne(y).sum()) for x, y in parts) / len(labels), 3)


def steps(model: nn.Module, batches: Iterator[Batch], loss: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Train with a rate that falls linearly to 0."""
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / number)
    model.train()
    for _ in range(number):
        value = loss(model, next(batches))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        rates.step()


def digits(seed: int, folder: Path) -> Subject:
    """The demo's network, trained with the demo's recipe; fine-tuned for 5 epochs."""
    torch.manual_seed(seed)
    data, model = load_digits(), DigitsNet()
    trained(model, folder / f"digits-{seed}", lambda: train_dense(model, data, Recipe(), lambda *_: None))

    def drawn() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for rows in torch.split(torch.randperm(len(data.train), generator=generator), 64):
                yield data.train.images[rows], data.train.labels[rows]

    def train(model: nn.Module) -> None:
        sgd = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
        steps(model, drawn(), cross_entropy, sgd, number=5 * 18)

    batches = [batch for batch, _ in zip(drawn(), range(CALIBRATION), strict=False)]
    error = partial(share_of_errors, data.validation.images, data.validation.labels)
    return Subject(model, "conv*", batches, cross_entropy, error, train)


def vgg(seed: int, folder: Path, epochs: int = 5) -> Subject:
    """VGG-16 at a quarter of its width, trained for 5 epochs of 10,000 pictures; fine-tuned for one."""
    torch.manual_seed(seed)
    data, model = cifar10(), VGG16(width=0.25)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack this argument

    def drawn(number: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(number)
        while True:
            for rows in torch.split(torch.randperm(PICTURES, generator=generator), 128):
                yield data.training_batch(rows, generator), data.train.labels[rows]

    def train(model: nn.Module, rate: float, epochs: int, number: int) -> None:
        sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
        steps(model, drawn(number), cross_entropy, sgd, number=epochs * -(-PICTURES // 128))

    trained(model, folder / f"vgg-{seed}-{epochs}", lambda: train(model, 0.05, epochs, seed))
    rows = torch.randperm(PICTURES, generator=torch.Generator().manual_seed(seed))[: CALIBRATION * 128]
    batches = [(data.seen(data.train.images[it]), data.train.labels[it]) for it in torch.split(rows, 128)]
    images, labels = data.seen(data.validation.images[:VALIDATION]), data.validation.labels[:VALIDATION]
    error = partial(share_of_errors, images, labels)
    tune = partial(train, rate=0.02, epochs=1, number=100 + seed)
    return Subject(model, "features.*", batches, cross_entropy, error, tune)


def pitch(seed: int, folder: Path) -> Subject:
    """CREPE; fine-tuned with 480 frames. Seeds differ in the sounds, and in random scores."""
    sounds = crepe.synthesised(180, seed=10_000 + seed)

    def train(model: nn.Module) -> None:
        frames, cents = crepe.synthesised(480, seed=20_000 + seed)
        batches = zip(torch.split(frames, 16), torch.split(cents, 16), strict=True)
        steps(model, batches, crepe.loss, torch.optim.AdamW(model.parameters(), lr=2e-4), number=30)

    def error(model: nn.Module) -> float:
        return round(100 - crepe.accuracy(model, sounds), 3)

    batches = crepe.calibration(seed)[: CALIBRATION // 2]
    return Subject(crepe.pretrained("full", folder), "convs.*", batches, crepe.loss, error, train)


def trained(model: nn.Module, folder: Path, train: Callable[[], None]) -> None:
    """Load a network that an earlier run has trained, or train and save it."""
    if (folder / "arch.json").exists():
        keepk.load(model, folder)
        return
    train()
    keepk.save(model, folder)


SUBJECTS: dict[str, Callable[[int, Path], Subject]] = {"digits": digits, "vgg16-quarter-cifar10": vgg, "crepe": pitch}


def cut(subject: Subject, name: str, share: float, floor: float, seed: int) -> nn.Module:
    """A copy of the network that is cut to a share of its MACs, whose BatchNorms are as they were."""
    model, metric = copy.deepcopy(subject.dense), METRICS[name]
    seen = keepk.Statistics(model) if name == "taylor" else None
    scores = metric(seen) if seen is not None else metric(seed=seed) if name == "random" else metric
    space = keepk.channels(subject.select, macs=share, metric=scores, layer_floor=floor)
    with keepk.Pruner(model, space, example=subject.batches[0][0][:2]) as pruner, seen or nullcontext():
        model.eval()
        for batch in subject.batches if seen is not None else ():
            model.zero_grad()
            subject.loss(model, batch).backward()  # type: ignore[no-untyped-call]  # torch's own
            seen.update() if seen is not None else None
        pruner.step()
    model.zero_grad()
    return model


def widths(model: nn.Module) -> list[int]:
    """The number of output channels of every layer with weights."""
    return [len(it.weight) for it in model.modules() if isinstance(it, nn.Conv1d | nn.Conv2d | nn.Linear)]


def measured(subject: Subject, name: str, share: float, floor: float, seed: int) -> dict[str, Any]:
    """The errors of one cut."""
    model = cut(subject, name, share, floor, seed)
    line = {"macs": model_costs(model, subject.batches[0][0][:2]).macs, "widths": widths(model)}
    line["error_cut"] = subject.error(model)
    keepk.recalibrate(model, subject.batches)
    line["error_recalibrated"] = subject.error(model)
    if (share, floor) == TUNED:
        subject.train(model)
        line["error_tuned"] = subject.error(model)
    return line


class Lines:
    """The result file, which is written after every line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[dict[str, Any]] = json.loads(path.read_text())["lines"] if path.exists() else []

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The line with these values."""
        return next((it for it in self.all if all(it.get(name) == value for name, value in key.items())), None)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, and write the file."""
        self.all.append(line)
        result = {
            "benchmark": "default_metric",
            "calibration_batches": CALIBRATION,
            "threads": 1,
            "cpu_seconds": round(sum(it.get("seconds", 0) for it in self.all), 1),
            "lines": self.all,
            "versions": versions(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partly = self.path.with_suffix(".part")
        partly.write_text(json.dumps(result, indent=1) + "\n")
        partly.replace(self.path)
        print(json.dumps({key: value for key, value in line.items() if key != "widths"}), flush=True)


def unbound(line: dict[str, Any], dense: dict[str, Any], floor: float) -> bool:
    """Whether every layer of a network that was cut without a floor is wider than this floor would leave it."""
    return all(now >= -(-floor * before // 1) for now, before in zip(line["widths"], dense["widths"], strict=True))


def run(lines: Lines, network: str, seed: int, folder: Path) -> None:
    """Measure what is missing of one network and seed."""
    key = {"network": network, "seed": seed}
    points = [(name, share, floor) for name in METRICS for share in SHARES for floor in FLOORS]
    missing = [it for it in points if not lines.find(**key, metric=it[0], share=it[1], floor=it[2])]
    if not missing:
        return
    began = time.process_time()
    subject = SUBJECTS[network](seed, folder)
    dense = lines.find(**key, metric="dense")
    if dense is None:
        dense = {**key, "metric": "dense", "widths": widths(subject.dense), "error": subject.error(subject.dense)}
        lines.add({**dense, "seconds": round(time.process_time() - began, 1)})
    for name, share, floor in missing:
        began, point = time.process_time(), {**key, "metric": name, "share": share, "floor": floor}
        same = lines.find(**{**point, "floor": 1}) if floor != 1 else None
        if same is not None and unbound(same, dense, floor) and (share, floor) != TUNED:
            lines.add({**same, **point, "seconds": 0})  # the floor binds nowhere, so the cut is the same
            continue
        found = measured(subject, name, share, floor, seed)
        lines.add({**point, **found, "seconds": round(time.process_time() - began, 1)})


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=SUBJECTS, action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("runs/default_metric"))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/default_metric.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", keepk.KeepkWarning)
    lines = Lines(arguments.out)
    for seed in arguments.seeds:
        for network in arguments.network or SUBJECTS:
            run(lines, network, seed, arguments.folder)


if __name__ == "__main__":
    main()
