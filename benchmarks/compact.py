"""What sweeping dead neurons takes from the LeNets that weight pruning left sparse.

    python benchmarks/compact.py --runs runs --out results/benchmarks/compact.json

Reads the last checkpoints of `keepk run lenet-300-100` and `keepk run lenet-5`, compacts each network, and compares
what it computes for random pictures before and after.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import keepk
from keepk.paper.experiments import EXPERIMENTS
from keepk.paper.results import versions


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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for experiment in ("lenet-300-100", "lenet-5"):
        for name, recipe in EXPERIMENTS[experiment].items():
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
