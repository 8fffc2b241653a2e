"""One small table over all experiments, for the first screen: what was kept, at which error, how much smaller."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from keepk.paper import results
from keepk.show.tables import Table

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """A point of an experiment, and the recipe whose full network it is held against."""

    name: str
    experiment: str
    recipe: str
    asked: int
    dense: str
    unit: str


LINES = (
    Line("LeNet-300-100, MNIST", "lenet-300-100", "keepk", 17_329, "keepk", "weights"),
    Line("LeNet-300-100, MNIST", "lenet-300-100", "keepk", 3_999, "keepk", "weights"),
    Line("LeNet-5, MNIST", "lenet-5", "keepk", 3_879, "keepk", "weights"),
    Line("VGG-16, width 1/4, CIFAR-10", "vgg16-cifar10", "keepk-60", 422, "control", "channels"),
    Line("VGG-16, width 1/4, CIFAR-10", "vgg16-cifar10", "keepk-70", 316, "control", "channels"),
    Line("DenseNet-40, k = 4, a third of CIFAR-10", "densenet40-cifar10", "keepk-60", 1_248, "control", "reads"),
)


def summary_table(result_folder: Path) -> Table:
    """Test errors are means over the seeds that there are."""
    columns = ("network", "kept", "test %", "dense %", "parameters", "MACs")
    rows = [_row(line, results.read(result_folder / f"{line.experiment}.jsonl")) for line in LINES]
    return Table(columns, tuple(rows), title="what was kept, and at which test error")


def _row(line: Line, records: Records) -> tuple[str, ...]:
    kept = [it for it in records if (it["recipe"], it["asked"]) == (line.recipe, line.asked)]
    dense = [it for it in records if it["recipe"] == line.dense and it["asked"] == it["total"]]
    (count,) = {it["kept"] for it in kept}
    error, full = (f"{mean(it['test_error'] for it in found):.2f}" for found in (kept, dense))
    less = (_less(kept, dense, key) for key in ("parameters", "macs"))
    return (line.name, f"{count:,} of {kept[0]['total']:,} {line.unit}", error, full, *less)


def _less(kept: Records, dense: Records, key: str) -> str:
    """How many times fewer; nothing where only zeros were made."""
    if not all(key in it for it in (*kept, *dense)):
        return ""
    return f"1/{mean(it[key] for it in dense) / mean(it[key] for it in kept):.1f}"
