"""Tables of pruning to a budget: the comparison of metrics, and the pretrained networks of `examples/`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from keepk.errors import DataError
from keepk.reports.tables import Table

Lines = Sequence[Mapping[str, Any]]
# Columns of the comparison of metrics: title, share of the MACs, floor, and the measured error.
ERRORS = (
    ("1/2, cut %", 0.5, 0.1, "error_cut"),
    ("recalibrated %", 0.5, 0.1, "error_recalibrated"),
    ("no floor %", 0.5, 1, "error_recalibrated"),
    ("1/4, cut %", 0.25, 0.1, "error_cut"),
    ("recalibrated %", 0.25, 0.1, "error_recalibrated"),
    ("no floor %", 0.25, 1, "error_recalibrated"),
    ("trained %", 0.25, 0.1, "error_tuned"),
)
NETWORKS = {"digits": "digits", "vgg16-quarter-cifar10": "VGG-16, width 1/4", "crepe": "CREPE"}


def default_metric(folder: Path) -> Table:
    """The error of each metric at equal MACs, as a mean over seeds, by network."""
    path = folder / "default_metric.json"
    if not path.exists():
        raise DataError(f"{path}: no such result. Run python benchmarks/default_metric.py.")
    lines: Lines = json.loads(path.read_text())["lines"]
    rows = list[tuple[str, ...]]()
    for network in dict.fromkeys(line["network"] for line in lines):
        mine = [line for line in lines if line["network"] == network]
        dense = [line["error"] for line in mine if line["metric"] == "dense"]
        rows.append((f"{NETWORKS[network]}, dense: {mean(dense):.2f} %", *[""] * len(ERRORS), ""))
        for metric in dict.fromkeys(line["metric"] for line in mine if line["metric"] != "dense"):
            found = [_errors(mine, metric, share, floor, error) for _, share, floor, error in ERRORS]
            cells = (f"{mean(it):.1f}" if it else "" for it in found)
            rows.append((metric, *cells, str(len(found[-1]))))
    return Table(("metric", *(title for title, *_ in ERRORS), "seeds"), tuple(rows))


def _errors(lines: Lines, metric: str, share: float, floor: float, error: str) -> list[float]:
    point = (metric, share, floor)
    return [it[error] for it in lines if (it["metric"], it.get("share"), it.get("floor")) == point and error in it]


def crepe(folder: Path) -> Table:
    """The pruned pitch trackers, beside the dense one, the tiny one and random channels, as means over seeds."""
    lines = read_lines(folder / "crepe.jsonl")
    dense = next(it for it in lines if it["network"] == "dense")
    rows = []
    for macs, network in points(lines):
        found = [it for it in lines if (it["macs_asked"], it["network"]) == (macs, network)]
        speeds = [it["times_as_fast"][0] for it in found]
        rows.append(
            (
                network,
                f"{mean(it['macs'] for it in found) / dense['macs']:.4f}",
                f"{mean(it['parameters'] for it in found):,.0f}",
                spread([it["accuracy"] for it in found]),
                f"{mean(speeds):.1f}",
                f"{mean(it['file_bytes'] for it in found) / 1e6:.2f}",
                str(len(found)),
            )
        )
    columns = ("network", "MACs / dense", "parameters", "accuracy %", "times as fast", "file, MB", "seeds")
    return Table(columns, tuple(rows))


def points(lines: Lines) -> list[tuple[float | int | None, str]]:
    """The pairs of a budget and a kind of network: those without a budget first, then by falling cost."""
    pairs = dict.fromkeys((line["macs_asked"], line["network"]) for line in lines)
    cost = {pair: max(it["macs"] for it in lines if it["macs_asked"] == pair[0]) for pair in pairs}
    return sorted(pairs, key=lambda pair: (pair[0] is not None, -cost[pair] if pair[0] is not None else 0))


def spread(values: Sequence[float]) -> str:
    """The mean, and the range if there are several values.

    >>> spread([90.0]), spread([90.0, 92.0])
    ('90.0', '91.0 (90.0 to 92.0)')
    """
    several = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{mean(values):.1f}{several}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file."""
    if not path.exists():
        raise DataError(f"{path}: no such result. Run the example that writes it.")
    return [json.loads(line) for line in path.read_text().splitlines()]
