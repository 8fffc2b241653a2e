"""The smallest floor that does not hurt: accuracy after one-shot pruning and recalibration, for several `layer_floor=`.

    python benchmarks/layer_floor.py --out results/benchmarks/layer_floor.json

Trains the demo's network on scikit-learn's digits, and VGG-16 at a quarter of its width on the first 15,000 training
pictures of CIFAR-10, with each seed. Then `keepk.prune` cuts copies to a half and a quarter of the MACs, with every
floor and metric, and recalibrates them with eight batches. Errors are those on the validation set, in percent; nothing
is trained after the cut. A budget that a floor does not allow has no error. The default of `layer_floor` under a budget
is decided from these numbers.
"""

import argparse
import copy
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepk
from keepk.errors import SpaceError
from keepk_paper.digits import DigitsNet, Recipe, load_digits, train_dense
from keepk_paper.models import VGG16
from keepk_paper.pictures import cifar10
from keepk_paper.results import versions

FLOORS = (1, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
SHARES = (0.5, 0.25)
METRICS: dict[str, Callable[..., Any] | None] = {
    "default": None,
    "l2": keepk.metrics.l2,
    "product": keepk.metrics.product,
}
CALIBRATION = 8  # batches
PICTURES = 15_000
RATE, DECAY, BATCH = 0.05, 5e-4, 128
Trained = tuple[nn.Module, list[Tensor], Tensor, Tensor]  # with batches for calibration, validation inputs and labels


def trained_digits(seed: int, _epochs: int) -> Trained:
    """The demo's network, trained with the demo's recipe."""
    torch.manual_seed(seed)
    digits, model = load_digits(), DigitsNet()
    train_dense(model, digits, Recipe(), lambda *_: None)
    batches = [
        digits.train.images[rows] for rows in torch.split(torch.randperm(len(digits.train))[: CALIBRATION * 64], 64)
    ]
    return model, batches, digits.validation.images, digits.validation.labels


def trained_vgg(seed: int, epochs: int) -> Trained:
    """VGG-16 at a quarter of its width."""
    torch.manual_seed(seed)
    data, model = cifar10(), VGG16(width=0.25)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(PICTURES, generator=generator), BATCH):
            loss = F.cross_entropy(model(data.training_batch(rows, generator)), data.train.labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
        schedule.step()
    rows = torch.randperm(PICTURES, generator=generator)[: CALIBRATION * BATCH]
    batches = [data.seen(data.train.images[part]) for part in torch.split(rows, BATCH)]
    return model, batches, data.seen(data.validation.images), data.validation.labels


NETWORKS = {"digits": (trained_digits, (1, 2, 3)), "vgg16-quarter-cifar10": (trained_vgg, (1, 2))}


@torch.no_grad()
def error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The error in percent."""
    model.eval()
    parts = zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
    wrong = sum(int(model(x).argmax(1).ne(y).sum()) for x, y in parts)
    return round(100 * wrong / len(labels), 3)


def measured(network: str, seed: int, epochs: int) -> list[dict[str, Any]]:
    """One line per share, metric and floor."""
    train, _ = NETWORKS[network]
    dense, batches, images, labels = train(seed, epochs)
    found, dense_error = [], error(dense, images, labels)
    for share in SHARES:
        for name, metric in METRICS.items():
            for floor in FLOORS:
                model = copy.deepcopy(dense)
                line: dict[str, Any] = {"network": network, "seed": seed, "macs": share, "metric": name, "floor": floor}
                try:
                    keepk.prune(model, batches[0], macs=share, metric=metric, layer_floor=floor, calibrate=batches)
                except SpaceError:
                    found.append({**line, "dense_error": dense_error, "error": None})
                    continue
                found.append({**line, "dense_error": dense_error, "error": error(model, images, labels)})
                print(json.dumps(found[-1]), flush=True)
    return found


def means(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean error over seeds, by floor, for each network, share and metric."""
    kinds = dict.fromkeys((it["network"], it["macs"], it["metric"]) for it in lines)
    summary = []
    for network, share, metric in kinds:
        by_floor = {
            str(floor): [
                it["error"]
                for it in lines
                if (it["network"], it["macs"], it["metric"], it["floor"]) == (network, share, metric, floor)
            ]
            for floor in FLOORS
        }
        mean = {f: None if None in found else round(statistics.mean(found), 2) for f, found in by_floor.items()}
        summary.append({"network": network, "macs": share, "metric": metric, "mean_error_by_floor": mean})
    return summary


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--epochs", type=int, default=10, help="of VGG's training")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", keepk.KeepkWarning)
    lines = []
    for network in arguments.network or NETWORKS:
        for seed in NETWORKS[network][1]:
            lines += measured(network, seed, arguments.epochs)
    result = {
        "benchmark": "layer_floor",
        "vgg_epochs": arguments.epochs,
        "vgg_pictures": PICTURES,
        "calibration_batches": CALIBRATION,
        "threads": 1,
        "means": means(lines),
        "lines": lines,
        "versions": versions(),
    }
    print(json.dumps(result["means"], indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
