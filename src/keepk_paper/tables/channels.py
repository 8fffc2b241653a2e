"""Tables of the experiments that remove channels, beside the paper's numbers (Tables 3 to 5)."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from keepk.reports.tables import Table
from keepk_paper.results import label

Records = Sequence[dict[str, Any]]
Printed = tuple[str, str, str, str]  # who, channels, error in percent, parameters

# Tables 3 to 5 of the paper, by network and data. Liu et al. are the authors of Network Slimming, whose VGG is larger.
PRINTED: dict[str, list[Printed]] = {
    "vgg16-cifar10": [
        ("baseline", "4,224", "6.34", "14.98M"),
        ("DSC-2, 60 %", "1,689", "6.14", "4.40M"),
        ("DSC-2, 70 %", "1,267", "6.20", "2.88M"),
        ("Liu et al., baseline", "5,504", "6.34", "20.04M"),
        ("Liu et al., 70 %", "1,651", "6.20", "2.30M"),
    ],
    "densenet40-cifar10": [
        ("baseline", "9,360", "6.11", "1.02M"),
        ("DSC-2, 60 %", "3,744", "5.48", "0.45M"),
        ("DSC-2, 70 %", "2,808", "5.57", "0.34M"),
        ("Liu et al., 70 %", "2,808", "5.65", "0.35M"),
    ],
    "vgg16-cifar100": [
        ("baseline", "4,224", "26.81", "15.02M"),
        ("DSC-2, 50 %", "2,112", "26.55", "6.01M"),
        ("Liu et al., baseline", "5,504", "26.74", "20.08M"),
        ("Liu et al., 50 %", "2,752", "26.52", "5.00M"),
    ],
    "densenet40-cifar100": [
        ("baseline", "9,360", "25.36", "1.06M"),
        ("DSC-2, 60 %", "3,744", "25.66", "0.47M"),
        ("Liu et al., 60 %", "3,744", "25.72", "0.46M"),
    ],
    "vgg16-svhn": [
        ("baseline", "4,224", "2.18", "14.98M"),
        ("DSC-2, 60 %", "1,689", "2.06", "4.31M"),
        ("Liu et al., baseline", "5,504", "2.17", "20.04M"),
        ("Liu et al., 60 %", "2,201", "2.06", "3.04M"),
    ],
    "densenet40-svhn": [
        ("baseline", "9,360", "1.89", "1.02M"),
        ("DSC-2, 60 %", "3,744", "1.80", "0.46M"),
        ("Liu et al., 60 %", "3,744", "1.81", "0.44M"),
    ],
}
# Rows of the paper's tables belong to data, not to widths: `vgg16-half-cifar10` is printed beside `vgg16-cifar10`.
TABLES = {"cifar10": "Table 3", "cifar100": "Table 4", "svhn": "Table 5"}


def printed_rows(experiment: str) -> list[Printed]:
    """The paper's rows for the network and data of an experiment, whatever its width.

    >>> printed_rows("vgg16-half-cifar10") == printed_rows("vgg16-cifar10")
    True
    """
    network, *_, data = experiment.split("-")
    return PRINTED.get(f"{network}-{data}", [])


def layer_table(experiment: str, records: Records) -> Table:
    """The number of channels that each recipe leaves in each layer, with its first seed."""
    of_all = {name: total for name, (_, total) in records[0]["layers"].items()}
    first = dict[str, dict[str, Any]]()
    for record in sorted(records, key=lambda record: record["seed"]):
        first.setdefault(label(record), record)
    names = dict.fromkeys(map(label, records))  # in the order of the file
    pruned = [first[name] for name in names if first[name]["kept"] < first[name]["total"]]
    rows = [
        (str(number), f"{total:,}", *(f"{record['layers'][name][0]:,}" for record in pruned))
        for number, (name, total) in enumerate(of_all.items(), start=1)
    ]
    sums = ("total", f"{sum(of_all.values()):,}", *(f"{record['kept']:,}" for record in pruned))
    columns = ("layer", "dense", *map(label, pruned))
    return Table(columns, (*rows, sums), title=f"{experiment}: channels left by layer", total_row=True)


def cost_table(experiment: str, records: Records) -> Table:
    """Channels, test error, parameters, multiply-accumulates per image and CPU time, as means over the seeds."""
    rows = [
        (f"printed: {who}", kept, "", error, "", parameters, "", "", "")
        for who, kept, error, parameters in printed_rows(experiment)
    ]
    for recipe, asked in dict.fromkeys((label(record), record["asked"]) for record in records):
        found = [record for record in records if (label(record), record["asked"]) == (recipe, asked)]
        rows.append(
            (
                recipe,
                f"{asked:,}",
                " ".join(f"{kept:,}" for kept in sorted({record["kept"] for record in found})),
                f"{mean(record['test_error'] for record in found):.2f}",
                f"{mean(record['val_error'] for record in found):.2f}",
                f"{mean(record['printed_parameters'] for record in found):,.0f}",
                f"{mean(record['macs'] for record in found) / 1e6:.1f}M",
                f"{mean(record['cpu_seconds'] for record in found):,.0f}",
                str(len(found)),
            )
        )
    columns = ("recipe", "asked", "kept", "test %", "val %", "parameters", "MACs", "CPU s", "n")
    table = TABLES.get(experiment.rpartition("-")[2], "Table 3")
    return Table(columns, tuple(rows), title=f"{experiment}: means over n seeds ({table})")
