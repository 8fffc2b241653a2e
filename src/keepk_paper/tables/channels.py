"""Tables of the experiments that remove channels, beside the paper's numbers (Table 3)."""

from collections.abc import Sequence
from typing import Any

from keepk.reports.tables import Table

Records = Sequence[dict[str, Any]]
Printed = tuple[str, str, str, str]  # who, channels, error in percent, parameters

# Table 3 of the paper: CIFAR-10.
PRINTED: dict[str, list[Printed]] = {
    "vgg16-cifar10": [
        ("baseline", "4,224", "6.34", "14.98M"),
        ("DSC-2, 60 %", "1,689", "6.14", "4.40M"),
        ("DSC-2, 70 %", "1,267", "6.20", "2.88M"),
    ],
    "densenet40-cifar10": [
        ("baseline", "9,360", "6.11", "1.02M"),
        ("DSC-2, 60 %", "3,744", "5.48", "0.45M"),
        ("DSC-2, 70 %", "2,808", "5.57", "0.34M"),
    ],
}


def layer_table(experiment: str, records: Records) -> Table:
    """The number of channels that each recipe leaves in each layer."""
    of_all = {name: total for name, (_, total) in records[0]["layers"].items()}
    pruned = [record for record in records if record["kept"] < record["total"]]
    rows = [
        (str(number), f"{total:,}", *(f"{record['layers'][name][0]:,}" for record in pruned))
        for number, (name, total) in enumerate(of_all.items(), start=1)
    ]
    sums = ("total", f"{sum(of_all.values()):,}", *(f"{record['kept']:,}" for record in pruned))
    columns = ("layer", "dense", *(record["recipe"] for record in pruned))
    return Table(columns, (*rows, sums), title=f"{experiment}: channels left by layer", total_row=True)


def cost_table(experiment: str, records: Records) -> Table:
    """Channels, test error, parameters, multiply-accumulates per image and CPU time of each recipe."""
    printed = PRINTED.get(experiment, [])  # the paper prints nothing for other widths
    rows = [(f"printed: {who}", kept, "", error, "", parameters, "", "") for who, kept, error, parameters in printed]
    for record in records:
        rows.append(
            (
                record["recipe"],
                f"{record['asked']:,}",
                f"{record['kept']:,}",
                f"{record['test_error']:.2f}",
                f"{record['val_error']:.2f}",
                f"{record['printed_parameters']:,}",
                f"{record['macs'] / 1e6:.1f}M",
                f"{record['cpu_seconds']:,.0f}",
            )
        )
    columns = ("recipe", "asked", "kept", "test %", "val %", "parameters", "MACs", "CPU s")
    return Table(columns, tuple(rows), title=f"{experiment}: one seed (Table 3)")
