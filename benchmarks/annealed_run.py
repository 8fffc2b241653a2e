"""The time and the MACs saved by shrinking the paper's VGG-16 (full width) while it trains.

    python benchmarks/annealed_run.py --out results/benchmarks/annealed_run.json

Four copies of the network take turns, with a few training steps each per epoch of the plan (p0 = .6, N1 = 10, then up
to p = .7, 20 epochs; random images, SGD with momentum, channels last):

    dense    never pruned
    shrunk   channels are removed at every event. The time includes the events, and the extra time of the first step
             with new shapes
    by 16    the same with round_to=16, which gives widths that suit the vector units
    masked   the channels that `shrunk` removes are held at zero, and the network keeps its shape

Every layer is a separate space and loses the same share. With untrained weights a ranking over all layers would leave
a single channel in some of them, which is not typical of a trained network.

`share of MACs` is the mean over the epochs of the remaining multiply-accumulates, counted by torch. It is a lower bound
for the time of `shrunk` as a share of the time of `dense`. CPU seconds are user + system time of the process.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

import keepk
from keepk.model.costs import layer_costs
from keepk.plan.spaces import ChannelSpace
from keepk_paper.models import VGG16
from keepk_paper.results import versions

EPOCHS, PRUNE = 20, 0.7


def space_of(name: str, layer: nn.Conv2d, round_to: int | None) -> ChannelSpace:
    """A space that keeps 30 % of a layer's channels, rounded to a multiple of `round_to`."""
    keep = int(layer.out_channels * (1 - PRUNE) + 1e-9)
    if round_to:
        keep = max(1, round(keep / round_to)) * round_to
    return keepk.channels(name, keep=keep, schedule=keepk.Annealing(p0=0.6, n1=10, nu=0.02), round_to=round_to)


class Twin:
    """A network in training, with or without a Pruner."""

    def __init__(self, batch: int, shrink: Literal["each", "never"] | None, round_to: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = VGG16()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.images = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,))
        spaces = [
            space_of(name, layer, round_to)
            for name, layer in self.model.named_modules()
            if isinstance(layer, nn.Conv2d)
        ]
        self.pruner = shrink and keepk.Pruner(
            self.model, spaces, self.optimizer, epochs=EPOCHS, example=self.images[:2], shrink=shrink
        )
        self.seconds = list[float]()
        self.events = list[float]()

    def epoch(self, steps: int) -> None:
        """Run a first step, then `steps` more, then the event.

        The first step is slower, because kernels are prepared for new shapes: its extra time counts as part of the
        event. The median of the others is the time of a step.
        """
        taken = list[float]()
        for _ in range(1 + steps):
            begun = time.process_time()
            F.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken.append(time.process_time() - begun)
        self.seconds.append(statistics.median(taken[1:]))
        begun = time.process_time()
        if self.pruner:
            self.pruner.step()
        self.events.append(time.process_time() - begun + max(0.0, taken[0] - self.seconds[-1]))


def macs(model: nn.Module) -> int:
    return sum(layer.macs for layer in layer_costs(model, torch.zeros(1, 3, 32, 32)))


def measure(batch: int, steps: int) -> dict[str, dict[str, float]]:
    twins = {
        "dense": Twin(batch, None),
        "shrunk": Twin(batch, "each"),
        "by 16": Twin(batch, "each", round_to=16),
        "masked": Twin(batch, "never"),
    }
    dense_macs = macs(twins["dense"].model)
    left: dict[str, list[float]] = {name: [] for name in twins}
    for epoch in range(EPOCHS):
        for name, twin in twins.items():
            left[name].append(macs(twin.model) / dense_macs)  # before the event, as in the steps that follow
            twin.epoch(steps)
        print(f"epoch {epoch + 1}: " + ", ".join(f"{n} {t.seconds[-1]:.2f} s" for n, t in twins.items()), flush=True)
    return {
        name: {
            "step_cpu_seconds": statistics.mean(twin.seconds),
            "event_cpu_seconds": statistics.mean(twin.events),
            "macs_share": statistics.mean(left[name]),
            "last_macs_share": macs(twin.model) / dense_macs,
        }
        for name, twin in twins.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="measured steps per epoch")
    parser.add_argument("--steps-of-an-epoch", type=int, default=704, help="steps per event: 704 is 45,000 / 64")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    twins = measure(options.batch, options.steps)
    for twin in twins.values():
        twin["epoch_cpu_seconds"] = options.steps_of_an_epoch * twin["step_cpu_seconds"] + twin["event_cpu_seconds"]
        twin["time_share"] = twin["epoch_cpu_seconds"] / twins["dense"]["epoch_cpu_seconds"]
    report = {
        "benchmark": "annealed_run",
        "network": "VGG-16",
        "prune": PRUNE,
        "batch": options.batch,
        "steps": options.steps,
        "threads": options.threads,
        "twins": {name: {key: round(value, 5) for key, value in twin.items()} for name, twin in twins.items()},
        "versions": versions(),
    }
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
