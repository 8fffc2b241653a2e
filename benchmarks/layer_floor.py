"""The smallest floor that does not hurt: errors after one-shot pruning and recalibration, for several `layer_floor=`.

    python benchmarks/layer_floor.py --out results/benchmarks/layer_floor.json

The networks are those of `benchmarks/default_metric.py`, which trains them where `--folder` does not have them. Copies
are cut at once to a half and a quarter of the MACs, with every floor and metric, and recalibrated; nothing is trained
after the cut. Errors are in percent. A budget that a floor does not allow has no error. The default of `layer_floor`
under a budget is decided from these numbers.
"""

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch

import keepk
from default_metric import SUBJECTS, cut
from keepk.errors import SpaceError
from keepk_paper.results import versions

FLOORS = (1, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
SHARES = (0.5, 0.25)
METRICS = ("gamma", "product")
SEEDS = {"digits": (1, 2, 3), "vgg16-quarter-cifar10": (1, 2, 3), "crepe": (1,)}


def measured(network: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """One line per share, metric and floor."""
    subject, found = SUBJECTS[network](seed, folder), []
    dense_error = subject.error(subject.dense)
    for share in SHARES:
        for name in METRICS:
            for floor in FLOORS:
                line: dict[str, Any] = {"network": network, "seed": seed, "macs": share, "metric": name, "floor": floor}
                try:
                    model = cut(subject, name, share, floor, seed)
                except SpaceError:
                    found.append({**line, "dense_error": dense_error, "error": None})
                    continue
                keepk.recalibrate(model, subject.batches)
                found.append({**line, "dense_error": dense_error, "error": subject.error(model)})
                print(json.dumps(found[-1]), flush=True)
    return found


def means(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean error over seeds, by floor, for each network, share and metric."""
    kinds = dict.fromkeys((it["network"], it["macs"], it["metric"]) for it in lines)
    summary = []
    for network, share, metric in kinds:
        by_floor = {
            str(floor): [
                it["error"]
                for it in lines
                if (it["network"], it["macs"], it["metric"], it["floor"]) == (network, share, metric, floor)
            ]
            for floor in FLOORS
        }
        mean = {f: None if None in found else round(statistics.mean(found), 2) for f, found in by_floor.items()}
        summary.append({"network": network, "macs": share, "metric": metric, "mean_error_by_floor": mean})
    return summary


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=SEEDS, action="append")
    parser.add_argument("--folder", type=Path, default=Path("runs/default_metric"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", keepk.KeepkWarning)
    lines = []
    for network in arguments.network or SEEDS:
        for seed in SEEDS[network]:
            lines += measured(network, seed, arguments.folder)
    result = {
        "benchmark": "layer_floor",
        "threads": 1,
        "means": means(lines),
        "lines": lines,
        "versions": versions(),
    }
    print(json.dumps(result["means"], indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
