"""An annealed run of the paper's VGG-16 at full width: the time that shrinking saves, beside the MACs that it saves.

    python benchmarks/annealed_run.py --out results/benchmarks/annealed_run.json

Three twins take turns, a few training steps each for every epoch of the plan (p0 = .6, N1 = 10, nu = .01 to p = .7, 20
epochs; random pictures, SGD with momentum, channels last):

    dense    never pruned
    shrunk   channels taken out at every event; the events themselves are counted
    masked   the same channels held at zero in a network that keeps its shape

`share of MACs` is the mean over the epochs of the multiply-accumulates that are left, by torch's own counter: the limit
for the shrunk twin's share of the dense twin's time. CPU seconds are user + system of the process.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import keepk
from keepk.graph.costs import layer_costs
from keepk.paper.models import VGG16
from keepk.paper.results import versions

PLAN = keepk.Annealing(p0=0.6, n1=10, nu=0.01)
EPOCHS, PRUNE = 20, 0.7


class Twin:
    """A network in training, with or without a Pruner."""

    def __init__(self, batch: int, shrink: str | None) -> None:
        torch.manual_seed(0)
        self.model = VGG16().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.images = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,))
        self.pruner = shrink and keepk.Pruner(
            self.model,
            [keepk.channels("features.*", prune=PRUNE, schedule=PLAN)],
            self.optimizer,
            epochs=EPOCHS,
            example=self.images[:2],
            shrink=shrink,  # type: ignore[arg-type]
        )
        self.seconds = list[float]()
        self.events = list[float]()

    def epoch(self, steps: int) -> None:
        """Some steps, the median of which stands for all of them, and the event."""
        taken = list[float]()
        for _ in range(steps):
            begun = time.process_time()
            F.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken.append(time.process_time() - begun)
        self.seconds.append(statistics.median(taken))
        begun = time.process_time()
        if self.pruner:
            self.pruner.step()
        self.events.append(time.process_time() - begun)


def macs(model: nn.Module) -> int:
    return sum(layer.macs for layer in layer_costs(model, torch.zeros(1, 3, 32, 32)))


def measure(batch: int, steps: int) -> dict[str, Any]:
    twins = {"dense": Twin(batch, None), "shrunk": Twin(batch, "each"), "masked": Twin(batch, "never")}
    dense_macs, left = macs(twins["dense"].model), list[float]()
    for epoch in range(EPOCHS):
        left.append(macs(twins["shrunk"].model) / dense_macs)  # of the steps that follow
        for twin in twins.values():
            twin.epoch(steps)
        print(f"epoch {epoch + 1}: " + ", ".join(f"{n} {t.seconds[-1]:.2f} s" for n, t in twins.items()), flush=True)
    dense = sum(twins["dense"].seconds)
    return {
        "channels": twins["shrunk"].pruner.certificate,  # type: ignore[union-attr]
        "macs_share_by_epoch": [round(share, 4) for share in left],
        "macs_share": round(statistics.mean(left), 4),
        "dense_step_cpu_seconds": round(dense / EPOCHS, 4),
        "steps_share": {name: round(sum(twin.seconds) / dense, 4) for name, twin in twins.items()},
        "event_cpu_seconds": {name: round(sum(twin.events) / EPOCHS, 4) for name, twin in twins.items()},
        "last_macs_share": round(macs(twins["shrunk"].model) / dense_macs, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each epoch")
    parser.add_argument("--steps-of-an-epoch", type=int, default=704, help="what an event is set against: 45,000 / 64")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.batch, options.steps)
    whole = options.steps_of_an_epoch * found["dense_step_cpu_seconds"]
    shares = {
        name: round(found["steps_share"][name] + found["event_cpu_seconds"][name] / whole, 4)
        for name in found["steps_share"]
    }
    report = {
        "benchmark": "annealed_run",
        "network": "VGG-16",
        "batch": options.batch,
        "steps": options.steps,
        "threads": options.threads,
        **found,
        "time_share": shares,
        "time_share_by_macs_share": round(shares["shrunk"] / found["macs_share"], 3),
        "versions": versions(),
    }
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
