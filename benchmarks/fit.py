"""`keepk.fit` on three convolutions: the budget in MACs with which a network meets 45 % of its latency.

    python benchmarks/fit.py --out results/benchmarks/fit.json    # on a quiet machine; under a minute

The network has convolutions with 64, 128 and 128 channels and random weights, for images of 32 x 32 pixels; batch 1,
one thread, torch. The latency that is asked for is 45 % of the dense network's median, rounded to two digits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import keepk
from keepk_paper.results import versions

SHARE = 0.45


def network() -> tuple[nn.Module, Tensor]:
    """Three convolutions, and an example."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return nn.Sequential(*layers, *head).eval(), torch.randn(2, 3, 32, 32)


def run(repeats: int) -> dict[str, Any]:
    """The curve that `fit` measured, and what it printed."""
    model, images = network()
    dense = keepk.latency(model, images, batches=1, threads=1, repeats=repeats).rows[0].model.median
    asked = float(f"{SHARE * dense:.2g}")
    space = keepk.channels("*", metric=keepk.metrics.l2, name="conv")
    found = keepk.fit(model, space, images, latency_ms=asked, batch=1, threads=1, repeats=repeats)
    print(found)
    *_, last = [index for index, line in enumerate(str(found).splitlines()) if line.startswith("macs=")]
    return {"benchmark": "fit", **found.data(), "said": str(found).splitlines()[last:], "versions": versions()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = run(options.repeats)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
