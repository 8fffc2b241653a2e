"""Inference time and MACs of the paper's VGG-16 with 70 % of its channels removed, compared with the dense network.

    python benchmarks/inference.py --out results/benchmarks/inference.json

The network has full width and is untrained, because its cost does not depend on the values of the weights. One event
keeps exactly 1,267 of its 4,224 channels, ranked by norm relative to the largest norm of the layer. `keepk.latency`
measures the two networks in turns, in torch and in onnxruntime, with batches of 1 and 32.
"""

import argparse
import json
from pathlib import Path

import torch

import keepk
from keepk.model.costs import layer_costs
from keepk_paper.models import VGG16
from keepk_paper.results import versions

KEEP = 1_267


def pruned(example: torch.Tensor) -> VGG16:
    torch.manual_seed(0)
    model = VGG16()
    metric = keepk.metrics.blend(alpha=0, weights=keepk.metrics.l1_l2, over="layer")
    keepk.Pruner(model, [keepk.channels("features.*", keep=KEEP, metric=metric)], example=example).step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    example = torch.randn(2, 3, 32, 32)
    dense, small = VGG16(), pruned(example)
    macs = [sum(layer.macs for layer in layer_costs(net, example[:1])) for net in (dense, small)]
    measured = keepk.latency(
        small,
        example,
        baseline=dense,
        batches=(1, 32),
        repeats=options.repeats,
        threads=options.threads,
        runtimes=("torch", "onnxruntime"),
    )
    print(measured, f"MACs: {macs[0]:,} / {macs[1]:,} = {macs[0] / macs[1]:.1f}", sep="\n")
    report = {
        "benchmark": "inference",
        "network": "VGG-16",
        "channels": KEEP,
        "macs": macs,
        "macs_ratio": round(macs[0] / macs[1], 3),
        "parameters": [sum(parameter.numel() for parameter in net.parameters()) for net in (dense, small)],
        "latency": measured.data(),
        "versions": versions(),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
