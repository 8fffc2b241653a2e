"""The cost of holding masks: a training step with masks, compared with the same step without them.

    python benchmarks/hold_masks.py --out results/benchmarks/hold_masks.json

Two copies of a network, one with masks, take turns in blocks of steps, so that other load on the machine affects both.
The cost is the median difference of the pairs, in CPU seconds, as a share of the median step without masks.
`hold alone` times the masks' hook by itself.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import keepk
from keepk_paper.models import VGG16, LeNet300
from keepk_paper.results import versions

Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def cpu_seconds(work: Callable[[], object], times: int) -> float:
    before = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - before) / times


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...]) -> Callable[[], None]:
    inputs, labels = torch.randn(128, *shape), torch.randint(10, (128,))
    if shape[0] == 3:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
        inputs = inputs.to(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def measure(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], optimizer_of: Optimizers, pairs: int, block: int
) -> dict[str, Any]:
    twins = [make(), make()]
    optimizers = [optimizer_of(model.parameters()) for model in twins]
    steps = [training_step(model, optimizer, shape) for model, optimizer in zip(twins, optimizers, strict=True)]
    pruner = keepk.Pruner(twins[1], [keepk.weights("*", prune=0.9)], optimizers[1])
    pruner.step()
    for step in steps * 3:  # warm up
        step()
    timed = [[cpu_seconds(step, block) for step in steps] for _ in range(pairs)]
    alone = [cpu_seconds(lambda: pruner._after_update(optimizers[1]), block) for _ in range(pairs)]
    base = statistics.median(plain for plain, _ in timed)
    differences = sorted(held - plain for plain, held in timed)
    return {
        "network": name,
        "optimizer": type(optimizers[0]).__name__,
        "weights": sum(parameter.numel() for parameter in twins[0].parameters()),
        "pairs": pairs,
        "steps_per_block": block,
        "threads": torch.get_num_threads(),
        "step_cpu_seconds": base,
        "held_step_cpu_seconds": statistics.median(held for _, held in timed),
        "cost_percent": 100 * statistics.median(differences) / base,
        "cost_percent_quartiles": [100 * differences[len(differences) * q // 4] / base for q in (1, 3)],
        "hold_alone_percent": 100 * statistics.median(alone) / base,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/hold_masks.json"))
    parser.add_argument("--pairs", type=int, nargs=2, default=(60, 10), metavar=("LENET", "VGG"))
    options = parser.parse_args()
    torch.manual_seed(0)

    def sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4)

    def adam(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=1e-4)

    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows.append(measure("LeNet-300-100", LeNet300, (1, 28, 28), sgd, options.pairs[0], 20))
        rows.append(measure("LeNet-300-100", LeNet300, (1, 28, 28), adam, options.pairs[0], 20))
    rows.append(measure("CIFAR VGG-16", VGG16, (3, 32, 32), sgd, options.pairs[1], 1))
    report = {"batch": 128, "versions": versions(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for row in rows:
        low, high = row["cost_percent_quartiles"]
        print(
            f"{row['network']:<14} {row['optimizer']:<5} {row['threads']} threads   "
            f"step {1000 * row['step_cpu_seconds']:8.2f} ms   "
            f"masks {row['cost_percent']:5.2f} % ({low:.2f} to {high:.2f})   "
            f"hold alone {row['hold_alone_percent']:.2f} %"
        )


if __name__ == "__main__":
    main()
