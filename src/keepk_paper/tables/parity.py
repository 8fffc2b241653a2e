"""The table of the parity experiment, generated from its result file."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from keepk.reports.tables import Table
from keepk_paper import results
from keepk_paper.parity_training import at_floor

Records = Sequence[dict[str, Any]]


def error_table(records: Records) -> Table:
    """The mean test error of the chosen networks, and how many draws and starts reach the noise floor."""
    recipes = list(dict.fromkeys(record["recipe"] for record in records))
    nodes = sorted({record["asked"] for record in records})
    rows = [
        (f"{asked:,}", *(cell for name in recipes for cell in _cells(_of(records, name, asked)))) for asked in nodes
    ]
    columns = ("hidden nodes", *(word for name in recipes for word in (f"{name} test %", "draws", "starts")))
    floors = {record["seed"]: record["noise_floor"] for record in records}
    floor = f"{mean(floors.values()):.2f}" if floors else "-"
    return Table(columns, tuple(rows), title=f"parity: test error, noise floor {floor} % (mean of {len(floors)} draws)")


def experiment_tables(path: Path) -> list[Table]:
    """One table per recipe of the results in `path`, because all recipes side by side need a wide terminal."""
    records = results.read(path)
    recipes = dict.fromkeys(record["recipe"] for record in records)
    return [error_table([record for record in records if record["recipe"] == name]) for name in recipes]


def _of(records: Records, recipe: str, asked: int) -> Records:
    return [record for record in records if (record["recipe"], record["asked"]) == (recipe, asked)]


def _cells(records: Records) -> tuple[str, str, str]:
    if not records:
        return "", "", ""
    draws = sum(record["at_floor"] for record in records)
    starts = [at_floor(error, record["noise_floor"]) for record in records for error in record["test_errors"]]
    error = mean(record["test_error"] for record in records)
    return f"{error:.2f}", f"{draws} of {len(records)}", f"{sum(starts)} of {len(starts)}"
