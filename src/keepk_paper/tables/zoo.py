"""Tables of the zoo's verdicts, which `benchmarks/zoo.py` writes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from keepk.errors import DataError
from keepk.reports.tables import Table

OUTCOMES = ("passed", "wrong", "refused", "failed")
PRUNERS = {"keepk": "keepk", "torch-pruning": "Torch-Pruning 1.6.1"}
# Sources as the README names them; the verdicts use the names of the modules of zoo/zoo_networks.
NAMES = {
    "handwritten": "hand-written",
    "vision": "torchvision",
    "language": "transformers",
    "medical": "monai",
}


def score(folder: Path) -> Table:
    """The number of networks with each outcome, by source and pruner."""
    verdicts = {name: _read(folder / f"{name}.jsonl") for name in PRUNERS}
    random = folder / "keepk-random.jsonl"
    columns = ("networks", "of", *(f"{said}: {word}" for said in PRUNERS.values() for word in OUTCOMES))
    sources = list(dict.fromkeys(row["source"] for row in verdicts["keepk"]))
    rows = [_row(source, {name: _of(source, rows) for name, rows in verdicts.items()}) for source in sources]
    rows.append(_row("all", verdicts))
    if random.exists():
        rows.append(_row("random", {"keepk": _read(random)}))
    return Table(columns, tuple(rows))


def summary(folder: Path) -> Table:
    """The number of networks that each pruner shrinks correctly or wrongly, by source: `score` in fewer columns."""
    verdicts = {name: _read(folder / f"{name}.jsonl") for name in PRUNERS}
    sources = list(dict.fromkeys(row["source"] for row in verdicts["keepk"]))
    rows = list[tuple[str, ...]]()
    for source in (*sources, "all"):
        found = {name: rows if source == "all" else _of(source, rows) for name, rows in verdicts.items()}
        counts = [Counter(row["outcome"] for row in found[name]) for name in PRUNERS]
        cells = (str(count[word]) for count in counts for word in ("passed", "wrong"))
        rows.append((NAMES.get(source, source), str(len(found["keepk"])), *cells))
    return Table(
        ("networks from", "networks", *(f"{it}: {word}" for it in PRUNERS.values() for word in ("correct", "wrong"))),
        tuple(rows),
    )


def files(folder: Path) -> Table:
    """The number of shrunk networks that compute the same after saving and loading, and as ONNX, by source."""
    verdicts = _read(folder / "keepk.jsonl")
    sources = list(dict.fromkeys(row["source"] for row in verdicts))
    rows = tuple(_file_row(name, _of(name, verdicts) if name != "all" else verdicts) for name in (*sources, "all"))
    return Table(("networks", "of", "save, load: equal", "ONNX: equal", "dense does not export"), rows)


def _file_row(name: str, verdicts: list[dict[str, Any]]) -> tuple[str, ...]:
    reloaded = sum(row["reload"] == "ok" for row in verdicts)
    onnx = Counter(row["onnx"] for row in verdicts)
    return (name, str(len(verdicts)), str(reloaded), str(onnx["ok"]), str(onnx["dense fails too"]))


def _of(source: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["source"] == source]


def _row(name: str, verdicts: dict[str, list[dict[str, Any]]]) -> tuple[str, ...]:
    cells = list[str]()
    for pruner in PRUNERS:
        counts = Counter(row["outcome"] for row in verdicts.get(pruner, []))
        cells += [f"{counts[word]:,}" if pruner in verdicts else "" for word in OUTCOMES]
    return (name, f"{len(verdicts['keepk']):,}", *cells)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Run benchmarks/zoo.py --out {path}.") from error
