"""The paper's networks at full width, pruned to exactly the paper's counts: their size, and shrunk = masked.

    python benchmarks/paper_sizes.py --out results/benchmarks/paper_sizes.json

Channels are ranked at random and the weights are untrained, so the number of parameters left is comparable to the
paper's only in its order of magnitude. Two copies are pruned by the same ranking, one shrunk and one masked.
`difference` is the largest difference between their outputs in float64, relative to the largest output.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import keepk
from keepk.model.costs import layer_costs
from keepk_paper.models import VGG16, DenseNet40, printed_parameters
from keepk_paper.results import versions

POINTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("VGG-16", {}, 4_224, "14.98M"),
    ("VGG-16", {}, 1_689, "4.40M"),
    ("VGG-16", {}, 1_267, "2.88M"),
    ("VGG-16", {"classes": 100}, 2_112, "6.01M"),
    ("DenseNet-40", {}, 9_360, "1.02M"),
    ("DenseNet-40", {}, 3_744, "0.45M"),
    ("DenseNet-40", {}, 2_808, "0.34M"),
]
NETWORKS: dict[str, tuple[type[nn.Module], str, Literal["output", "input"]]] = {
    "VGG-16": (VGG16, "features.*", "output"),
    "DenseNet-40": (DenseNet40, "*", "input"),
}


def pruned(name: str, options: dict[str, Any], keep: int, shrink: Literal["each", "never"]) -> tuple[nn.Module, int]:
    network, glob, at = NETWORKS[name]
    torch.manual_seed(0)
    model = network(**options).double().eval()
    space = keepk.channels(glob, keep=keep, at=at, metric=keepk.metrics.random(seed=0), name="channels")
    pruner = keepk.Pruner(model, [space], example=torch.zeros(2, 3, 32, 32).double(), shrink=shrink)
    pruner.step()
    return model, pruner.certificate["channels"]["total"]


@torch.no_grad()
def measure(name: str, options: dict[str, Any], keep: int, printed: str) -> dict[str, Any]:
    (small, total), (masked, _) = (pruned(name, options, keep, shrink) for shrink in ("each", "never"))
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    wanted = masked(images)
    return {
        "network": name if not options else f"{name}, {options['classes']} classes",
        "total": total,
        "kept": keep,
        "parameters": printed_parameters(small),
        "printed": printed,
        "macs": sum(layer.macs for layer in layer_costs(small, images[:1])),
        "dense_macs": sum(layer.macs for layer in layer_costs(masked, images[:1])),
        "difference": float((small(images) - wanted).abs().max() / wanted.abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for point in POINTS:
        rows.append(measure(*point))
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"benchmark": "paper_sizes", "rows": rows, "versions": versions()}
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
