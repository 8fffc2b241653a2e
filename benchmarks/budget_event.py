"""One event with a budget and one without, on the shapes of ResNet-50 and DenseNet-121.

    python benchmarks/budget_event.py --out results/benchmarks/budget_event.json

Both networks are written out below, with random weights; images of 224 x 224, batch 2, one thread, after one training
step with Adam, so that weights, gradients and Adam's two moments exist. One event with ``macs=0.5`` removes channels
from all layers (DenseNet: reads of BatchNorms). The event without a budget gets the number of channels that the first
one kept, as ``keep=``, so both remove about as much. They take turns, each on a fresh copy. The columns:

    event      Pruner.step with keep=K
    budget     Pruner.step with macs=0.5
    ratio      budget / event, medians
    costs      evaluations of the cost model in one event with a budget, and the seconds that they take together

Seconds are CPU seconds, user + system time of the process.
"""

import argparse
import copy
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepk
from keepk.graph.costs import CostModel
from keepk_paper.results import versions

BATCH, PICTURE, BUDGET = 2, 224, 0.5


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width != 4 * inner:
            self.shortcut = nn.Sequential(nn.Conv2d(width, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)).relu()
        joined: Tensor = self.norm3(self.conv3(y)) + self.shortcut(x)
        return joined.relu()


def resnet50() -> nn.Module:
    """A network with the layers of ResNet-50."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for stage, (inner, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(width, inner, 2 if stage and not block else 1))
            width = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


class DenseLayer(nn.Module):
    """Adds 32 channels to those that it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 128, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(128), nn.Conv2d(128, 32, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input with 32 more channels."""
        y = self.conv1(self.norm1(x).relu())
        return torch.cat([x, self.conv2(self.norm2(y).relu())], 1)


def densenet121() -> nn.Module:
    """A network with the layers of DenseNet-121."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for stage, blocks in enumerate((6, 12, 24, 16)):
        if stage:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
        for _ in range(blocks):
            layers.append(DenseLayer(width))
            width += 32
    head = [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*layers, *head)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "ResNet-50": (resnet50, {}),
    "DenseNet-121": (densenet121, {"at": "input"}),
}


def trained(build: Callable[[], nn.Module], pictures: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network after one step of Adam."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    F.cross_entropy(model(pictures), torch.arange(len(pictures))).backward()
    optimizer.step()
    return model, optimizer


def event(
    start: tuple[nn.Module, torch.optim.Optimizer], pictures: Tensor, options: dict[str, Any]
) -> tuple[keepk.Pruner, float]:
    """A Pruner of a fresh copy after one event, and the CPU seconds of the event."""
    model, optimizer = copy.deepcopy(start)
    space = keepk.channels("*", metric=keepk.metrics.l2, **options)
    pruner = keepk.Pruner(model, [space], optimizer, example=pictures)
    gc.collect()
    begin = time.process_time()
    pruner.step()
    return pruner, time.process_time() - begin


def costs(
    start: tuple[nn.Module, torch.optim.Optimizer], pictures: Tensor, options: dict[str, Any]
) -> tuple[int, float]:
    """How often an event evaluates the cost model, and the CPU seconds of all evaluations."""
    model, optimizer = copy.deepcopy(start)
    pruner = keepk.Pruner(model, [keepk.channels("*", metric=keepk.metrics.l2, **options)], optimizer, example=pictures)
    times, right = list[float](), CostModel.macs

    def watched(self: CostModel, removed: Any) -> int:
        begin = time.process_time()
        found = right(self, removed)
        times.append(time.process_time() - begin)
        return found

    with mock.patch.object(CostModel, "macs", watched):
        pruner.step()
    return len(times), sum(times)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """The result of one network."""
    build, options = NETWORKS[name]
    pictures = torch.randn(BATCH, 3, PICTURE, PICTURE, generator=torch.Generator().manual_seed(1))
    start = trained(build, pictures)
    bounded = {"macs": BUDGET, **options}
    pruner, _ = event(start, pictures, bounded)  # the first event of a process also pays for new memory
    kept, entry = pruner.kept["*"], pruner.certificate["*"]
    del pruner
    counted = {"keep": kept, **options}
    seconds: dict[str, list[float]] = {"event": [], "budget": []}
    for _ in range(repeats):
        for kind, numbers in (("event", counted), ("budget", bounded)):
            seconds[kind].append(event(start, pictures, numbers)[1])
    number, spent = costs(start, pictures, bounded)
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    return {
        "network": name,
        "channels": entry["total"],
        "kept": kept,
        "dense_macs": entry["dense"],
        "asked_macs": entry["asked"],
        "reached_macs": entry["reached"],
        "event_cpu_seconds": round(medians["event"], 4),
        "budget_cpu_seconds": round(medians["budget"], 4),
        "all_event_cpu_seconds": [round(it, 4) for it in seconds["event"]],
        "all_budget_cpu_seconds": [round(it, 4) for it in seconds["budget"]],
        "ratio": round(medians["budget"] / medians["event"], 3),
        "cost_evaluations": number,
        "cost_cpu_seconds": round(spent, 4),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", keepk.KeepkWarning)  # the weights are random, so that rankings say little
    found = []
    for name in NETWORKS:
        found.append(measure(name, arguments.repeats))
        print(json.dumps(found[-1]), flush=True)
    result = {
        "benchmark": "budget_event",
        "batch": BATCH,
        "picture": PICTURE,
        "budget": BUDGET,
        "threads": 1,
        "optimizer": "Adam",
        "repeats": arguments.repeats,
        "networks": found,
        "versions": versions(),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
