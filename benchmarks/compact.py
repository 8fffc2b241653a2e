"""The dead neurons that `keepk.compact` removes from LeNets with pruned weights.

    python benchmarks/compact.py --runs runs --out results/benchmarks/compact.json

Reads the last checkpoints of `keepk paper run lenet-300-100` and `keepk paper run lenet-5`, compacts each network, and
compares its outputs for random images before and after. A point in the middle of a recipe has no checkpoint, so with
`--data` (a folder with MNIST) the recipe is first trained up to that point, unless an earlier call has done so.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import keepk
from keepk.run.pruner import Pruner
from keepk_paper.data import mnist
from keepk_paper.experiments import EXPERIMENTS
from keepk_paper.recipes import Recipe
from keepk_paper.results import versions
from keepk_paper.train import Progress, Run

MIDDLE = ("lenet-5", "keepk", 3_879)  # experiment, recipe, weights


def until(recipe: Recipe, keep: int) -> Recipe:
    """The recipe up to the stage that leaves `keep` weights."""
    ends = [keep in (count for count, _ in stage.keep.values()) for stage in recipe.stages]
    return replace(recipe, name=f"until-{keep}", stages=recipe.stages[: ends.index(True) + 1])


def train(recipe: Recipe, seeds: int, data: Path, runs: Path) -> None:
    """Train the seeds that are not finished yet."""

    def say(progress: Progress, pruner: Pruner) -> None:
        print(f"epoch {progress.epoch}/{pruner.epochs}  {progress.cpu_seconds:.0f} CPU s", flush=True)

    torch.set_num_threads(1)  # as `keepk paper run` does, so that the numbers are the same
    for seed in range(1, seeds + 1):
        Run(recipe, seed, mnist(data), runs / f"{recipe.name}-{seed}").finish(say)


@torch.no_grad()
def measure(folder: Path, network: nn.Module) -> dict[str, Any]:
    keepk.load_checkpoint(folder, model=network)
    pictures = torch.randn(256, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    before, weights = network.eval()(pictures), nonzero(network)
    swept = keepk.compact(network, pictures[:2])
    difference = float((network(pictures) - before).abs().max() / before.abs().max())
    return {
        "run": folder.name,
        "weights": [weights, nonzero(network)],
        "parameters": [swept.parameters_before, swept.parameters_after],
        "units_removed": swept.removed,
        "folded": swept.folded,
        "relative_difference": difference,
        "layers": {name: list(p.shape) for name, p in network.named_parameters() if name.endswith("weight")},
    }


def nonzero(network: nn.Module) -> int:
    return sum(int(parameter.count_nonzero()) for parameter in network.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    middle = until(EXPERIMENTS[MIDDLE[0]][MIDDLE[1]], MIDDLE[2])
    if options.data:
        train(middle, options.seeds, options.data, options.runs / MIDDLE[0])
    rows = []
    for experiment in ("lenet-300-100", "lenet-5"):
        recipes = {**EXPERIMENTS[experiment], **({middle.name: middle} if experiment == MIDDLE[0] else {})}
        for name, recipe in recipes.items():
            for folder in sorted((options.runs / experiment).glob(f"{name}-*")):
                row = {"experiment": experiment, "recipe": name, **measure(folder, recipe.network())}
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.out:
        report = {"benchmark": "compact", "rows": rows, "versions": versions()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
