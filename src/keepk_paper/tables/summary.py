"""The README's table of results: units kept, test error, and how much smaller the network is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from keepk.reports.tables import Table
from keepk_paper import results

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """One row: a point of an experiment, and the recipe whose dense network it is compared with.

    Attributes:
        name: The network and data, as printed.
        experiment: The result file, without its suffix.
        recipe: The recipe that pruned.
        asked: K, which tells the points of one recipe apart.
        dense: The recipe of the dense network. A control that was trained for as many epochs as the pruned one is a
            fairer comparison than the network that pruning started from.
        unit: The units that were kept.
    """

    name: str
    experiment: str
    recipe: str
    asked: int
    dense: str
    unit: str


LINES = (
    Line("VGG-16, width 1/4, CIFAR-10", "vgg16-cifar10", "keepk-60", 422, "control", "channels"),
    Line("VGG-16, width 1/4, CIFAR-10", "vgg16-cifar10", "keepk-70", 316, "control", "channels"),
    Line(
        "DenseNet-40, growth rate 4, a third of CIFAR-10", "densenet40-cifar10", "keepk-60", 1_248, "control", "reads"
    ),
)


def summary_table(result_folder: Path) -> Table:
    """The table, with test errors averaged over the available seeds."""
    columns = ("network", "kept", "test error %", "dense %", "parameters", "MACs")
    rows = [_row(line, results.read(result_folder / f"{line.experiment}.jsonl")) for line in LINES]
    return Table(columns, tuple(rows), title="kept units and test error")


def _row(line: Line, records: Records) -> tuple[str, ...]:
    kept = [it for it in records if (it["recipe"], it["asked"]) == (line.recipe, line.asked)]
    dense = [it for it in records if it["recipe"] == line.dense and it["asked"] == it["total"]]
    (count,) = {it["kept"] for it in kept}
    error, full = (f"{mean(it['test_error'] for it in found):.2f}" for found in (kept, dense))
    less = (_less(kept, dense, key) for key in ("parameters", "macs"))
    return (line.name, f"{count:,} of {kept[0]['total']:,} {line.unit}", error, full, *less)


def _less(kept: Records, dense: Records, key: str) -> str:
    """The pruned network's cost as a fraction of the dense one's; empty for weights, which are only masked."""
    if not all(key in it for it in (*kept, *dense)):
        return ""
    return f"1/{mean(it[key] for it in dense) / mean(it[key] for it in kept):.1f}"
