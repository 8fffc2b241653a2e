"""The cost of collecting statistics: a training step with a `keepk.Statistics`, compared with the same step without.

    python benchmarks/collect_statistics.py --out results/benchmarks/collect_statistics.json

The network is VGG-16 at a quarter of its width, on random images of CIFAR's size, with SGD and momentum. A copy that
collects takes turns with a copy that does not, block by block, so that other load on the machine affects both. The cost
is the median difference of the pairs, in CPU seconds, as a share of the median step without statistics. `alone` times
the hooks and `update` by themselves, on the inputs and gradients of the last step, which other load affects less.
Nothing is pruned: both copies do the same work otherwise.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import keepk
from keepk.plan.spaces import Space
from keepk_paper.models import VGG16
from keepk_paper.results import versions

WIDTH = 0.25
Spaces = Callable[[keepk.Statistics], list[Space]]


def channels(metric: Callable[[keepk.Statistics], Callable[..., Any]]) -> Spaces:
    return lambda seen: [keepk.channels("*", prune=0.5, metric=metric(seen), name="channels")]


def weights(metric: Callable[[keepk.Statistics], Callable[..., Any]]) -> Spaces:
    return lambda seen: [keepk.weights(["*.weight"], prune=0.5, exclude=NORMS, metric=metric(seen), name="weights")]


NORMS = [f"{name}.weight" for name, it in VGG16(width=WIDTH).named_modules() if isinstance(it, nn.BatchNorm2d)]
CASES: dict[str, Spaces] = {
    "taylor, channels": channels(keepk.metrics.taylor),
    "fisher, channels": channels(keepk.metrics.fisher),
    "fisher, weights": weights(keepk.metrics.fisher),
    "activation, mean": channels(lambda seen: keepk.metrics.activation(seen, kind="mean")),
    "activation, l2": channels(lambda seen: keepk.metrics.activation(seen, kind="l2")),
    "activation, apoz": channels(lambda seen: keepk.metrics.activation(seen, kind="apoz")),
    "wanda, weights": weights(keepk.metrics.wanda),
}


def made(
    batch: int, memory_format: torch.memory_format
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., None]]:
    """A network, its optimizer, and a training step, which calls a function after backward."""
    torch.manual_seed(0)
    model = VGG16(width=WIDTH)
    model.to(memory_format=memory_format)  # type: ignore[call-overload]  # missing in torch's types
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images = torch.randn(batch, 3, 32, 32).contiguous(memory_format=memory_format)
    labels = torch.randint(10, (batch,))

    def step(after_backward: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        after_backward()
        optimizer.step()

    return model, optimizer, step


def cpu_seconds(work: Callable[[], None], times: int) -> float:
    before = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - before) / times


def by_itself(model: nn.Module, seen: keepk.Statistics, step: Callable[[], None]) -> Callable[[], None]:
    """A function that does what the statistics add to a step, and nothing else."""
    calls, modules = list[Callable[[], None]](), dict(model.named_modules())

    def remember(hook: Callable[..., None]) -> Callable[..., None]:
        return lambda module, args: calls.append(partial(hook, module, (args[0].detach().clone(),), {}))

    handles = [modules[it.name].register_forward_pre_hook(remember(it)) for it in seen._inputs.hooks]
    with seen.paused():
        step()
    for handle in handles:
        handle.remove()

    def work() -> None:
        for call in calls:
            call()
        seen.update()

    return work


def measure(
    name: str, spaces: Spaces, options: argparse.Namespace, memory_format: torch.memory_format
) -> dict[str, Any]:
    _, _, plain = made(options.batch, memory_format)
    model, _, step = made(options.batch, memory_format)
    seen = keepk.Statistics(model)
    # Without the optimizer, whose hooks would add to the cost, as nothing is masked.
    pruner = keepk.Pruner(model, spaces(seen), example=torch.randn(2, 3, 32, 32))

    def collecting() -> None:
        step(seen.update)

    for warm_up in (plain, collecting) * 2:
        warm_up()
    timed = [[cpu_seconds(work, options.block) for work in (plain, collecting)] for _ in range(options.pairs)]
    base = statistics.median(without for without, _ in timed)
    differences = [collected - without for without, collected in timed]
    low, middle, high = statistics.quantiles(differences, n=4, method="inclusive")
    assert seen.batches == 2 + options.pairs * options.block
    alone = [cpu_seconds(by_itself(model, seen, step), 1) for _ in range(options.pairs)]
    pruner.close()
    return {
        "metric": name,
        "memory_format": str(memory_format).removeprefix("torch."),
        "pairs": options.pairs,
        "steps_per_block": options.block,
        "step_cpu_seconds": base,
        "collecting_step_cpu_seconds": statistics.median(collected for _, collected in timed),
        "cost_percent": 100 * middle / base,
        "cost_percent_quartiles": [100 * low / base, 100 * high / base],
        "alone_percent": 100 * statistics.median(alone) / base,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/collect_statistics.json"))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--block", type=int, default=2, help="steps in a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[dict[str, Any]]()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for name, spaces in CASES.items():
            rows.append(measure(name, spaces, options, memory_format))
            row = rows[-1]
            low, high = row["cost_percent_quartiles"]
            print(
                f"{row['memory_format']:<18} {name:<17} step {1000 * row['step_cpu_seconds']:7.1f} ms   "
                f"cost {row['cost_percent']:5.2f} % ({low:.2f} to {high:.2f})   "
                f"alone {row['alone_percent']:.2f} %",
                flush=True,
            )
    report = {
        "network": "VGG-16, width 1/4",
        "batch": options.batch,
        "threads": 1,
        "versions": versions(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
