"""Sizes of compact files and the time to read them, with 90, 95 and 98 % of all weights pruned.

    python benchmarks/compact_files.py --out results/benchmarks/compact_files.json

The networks are untrained, and the same share of every weight tensor is pruned, by magnitude. Each is saved with
compact=False, compact=True and half=True; sizes are those of model.safetensors. The entropy bound is the least that any
lossless code needs for the places of a random choice of so many entries in each tensor, log2 of the number of choices,
plus the bits of the values and all tensors without zeros. Decoding and encoding are timed alone, in CPU seconds, as the
median of several runs; MB are those of the dense tensors.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import keepk
from keepk.storage.sparse import compacted, expanded
from keepk_paper.models import VGG16, LeNet5, LeNet300
from keepk_paper.results import versions

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LeNet-300-100": LeNet300,
    "LeNet-5": LeNet5,
    "VGG-16, 1/4 width": lambda: VGG16(width=0.25),
    "VGG-16": VGG16,
}


def pruned(build: Callable[[], nn.Module], share: float) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    names = [name for name, it in model.named_parameters() if it.dim() > 1]
    spaces = [keepk.weights(name, prune=share, schedule=keepk.OneShot()) for name in names]
    with keepk.Pruner(model, spaces) as pruner:
        pruner.step()
    return model


def entropy_bytes(model: nn.Module) -> float:
    bits = 0.0
    for tensor in model.state_dict().values():
        size, left = tensor.numel(), int(tensor.count_nonzero())
        choices = math.lgamma(size + 1) - math.lgamma(left + 1) - math.lgamma(size - left + 1)
        lossless = choices / math.log(2) + 8 * tensor.element_size() * left
        bits += min(lossless, 8 * tensor.nbytes)
    return bits / 8


def median_cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def measure(name: str, share: float, repeats: int) -> dict[str, Any]:
    model = pruned(NETWORKS[name], share)
    sizes, options = {}, {"plain": {"compact": False}, "compact": {"compact": True}, "half": {"half": True}}
    with TemporaryDirectory() as folder:
        for kind, chosen in options.items():
            keepk.save(model, Path(folder) / kind, **chosen)
            sizes[kind] = (Path(folder) / kind / "model.safetensors").stat().st_size
        loading = median_cpu_seconds(
            lambda: keepk.load(NETWORKS[name](), Path(folder) / "compact"), 3
        ) - median_cpu_seconds(NETWORKS[name], 3)
    weights = [it.detach() for it in model.parameters() if it.dim() > 1]
    parts = [(compacted(it), it) for it in weights]
    mb = sum(it.nbytes for it in weights) / 1e6
    encode = median_cpu_seconds(lambda: [compacted(it) for it in weights], repeats)
    decode = median_cpu_seconds(lambda: [expanded(part, it.dtype, it.numel()) for part, it in parts], repeats)
    return {
        "network": name,
        "pruned_percent": round(100 * share, 1),
        "weights": sum(it.numel() for it in weights),
        "kept": sum(int(it.count_nonzero()) for it in weights),
        "bytes": sizes,
        "entropy_bytes": round(entropy_bytes(model)),
        "decode_mb_per_second": round(mb / decode, 1),
        "encode_mb_per_second": round(mb / encode, 1),
        "load_cpu_seconds": round(loading, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in NETWORKS:
        for share in (0.9, 0.95, 0.98):
            rows.append(row := measure(name, share, options.repeats))
            times, bound = row["bytes"]["plain"] / row["bytes"]["compact"], row["bytes"]["plain"] / row["entropy_bytes"]
            print(
                f"{name}, {row['pruned_percent']} % pruned: {times:.1f} times smaller (entropy bound {bound:.1f}), "
                f"half {row['bytes']['plain'] / row['bytes']['half']:.1f}; decode {row['decode_mb_per_second']:.0f} "
                f"MB/s, encode {row['encode_mb_per_second']:.0f} MB/s",
                flush=True,
            )
    report = {"benchmark": "compact_files", "rows": rows, "versions": versions()}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
