"""Tables of pruning to a budget: the comparison of metrics, and the pretrained networks of `examples/`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from keepk.errors import DataError
from keepk.reports.tables import Table
from keepk_paper import results
from keepk_paper.results import USUAL, Training

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
    lines: Lines = _report(folder / "default_metric.json", "benchmarks/default_metric.py")["lines"]
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


NAMES = {"resnet50": "ResNet-50", "efficientnet_b0": "EfficientNet-B0", "convnext_atto": "ConvNeXt-atto"}
NAMES |= {"vit_tiny": "ViT-tiny", "tiny": "three convolutions"}
RUNTIMES = ("torch", "onnxruntime")


def round_to_auto(folder: Path) -> Table:
    """Half the MACs in milliseconds, with and without rounded widths, beside Torch-Pruning."""
    rows = list[tuple[str, ...]]()
    for line in _report(folder / "round_to_auto.json", "benchmarks/round_to_auto.py")["lines"]:
        name = f"{NAMES[line['network']]}, {line['variant']}"
        if "failed" in line:
            rows.append((name, f"failed: {line['failed'].partition(':')[0]}", "", "", "", ""))
            continue
        found = {it["runtime"]: it for it in line.get("latency", []) if it["batch"] == 1}
        times = [_times(found[runtime]) if runtime in found else ("-", "-") for runtime in RUNTIMES]
        rows.append((name, f"{line['macs'] / line['dense_macs']:.3f}", *times[0], *times[1]))
    columns = ("network", "MACs / dense", "torch, ms", "times as fast", "onnxruntime, ms", "times as fast")
    return Table(columns, tuple(rows))


def _times(row: Mapping[str, Any]) -> tuple[str, str]:
    ratio = row["ratio"]
    spread = f"({ratio['lower']:.2f} to {ratio['upper']:.2f})"
    return f"{row['model']['median']:.1f}", f"{ratio['median']:.2f} {spread}"


def fit(folder: Path) -> Table:
    """The curve of a `keepk.fit`, and the time of the chosen model in a fresh process."""
    report = _report(folder / "fit.json", "benchmarks/fit.py")
    dense, asked = report["curve"][0]["macs"], report["latency_ms"]
    rows = []
    for point in report["curve"]:
        meets = ("chosen" if point["macs"] == report["macs"] else "yes") if point["ms"]["median"] <= asked else "no"
        cost = (f"{point['macs']:,}", f"{point['macs'] / dense:.4f}", f"{sum(point['kept'].values()):,}")
        rows.append((*cost, *_quartiles(point["ms"]), f"{point['dense_ms']['median']:.2f}", meets))
    if report["confirmed"]:
        rows.append(("chosen, in a fresh process", "", "", *_quartiles(report["confirmed"]), "", ""))
    return Table(("MACs", "share", "channels", "ms", "quartiles", "dense ms", f"at most {asked:g} ms"), tuple(rows))


def _quartiles(times: Mapping[str, float]) -> tuple[str, str]:
    return f"{times['median']:.2f}", f"{times['lower']:.2f} to {times['upper']:.2f}"


def _report(path: Path, script: str) -> dict[str, Any]:
    if not path.exists():
        raise DataError(f"{path}: no such result. Run python {script}.")
    report: dict[str, Any] = json.loads(path.read_text())
    return report


# In the order of rows with the same budget.
RECIPES = (
    *("dense", "dense, trained", "tiny", "tiny, trained", "annealed", "3 of 6 layers", "annealed, random"),
    *("one-shot, Taylor", "one-shot", "one-shot, random"),
)
# The README's rows: result file, title, and what its budgets divide the dense network's MACs by.
SUMMARY = (("crepe", "CREPE, pretrained", (4, 10)), ("minilm", "all-MiniLM-L6-v2, pretrained", (2, 3)))


def crepe(folder: Path) -> Table:
    """The pruned pitch trackers, beside the dense one, the tiny one and random channels, as means over seeds."""
    rows = []
    for recipe, found in points(read_lines(folder / "crepe.jsonl")):
        costs = _costs(found)
        accuracy = spread([100 - it["test_error"] for it in found])
        rows.append(
            (recipe, *costs, accuracy, _mean(found, "ms", ".2f"), _speed(found), _megabytes(found), str(len(found)))
        )
    columns = ("network", "MACs / dense", "parameters", "accuracy %", "ms", "times as fast", "file, MB", "seeds")
    return Table(columns, tuple(rows))


def minilm(folder: Path) -> Table:
    """The pruned sentence encoders, beside the dense one, half of its layers, and random heads and neurons."""
    rows = []
    for recipe, found in points(read_lines(folder / "minilm.jsonl")):
        (line,) = found  # of one seed each
        rows.append(
            (
                recipe,
                *_costs(found),
                f"{sum(line['heads'])}",
                f"{sum(line['mlps']):,}",
                f"{line['spearman']:.3f}",
                f"{line['top1']:.1f}",
                f"{line['top10']:.1f}",
                f"{1_000 * line['batch'] / line['ms']:.0f}" if "ms" in line else "-",
                _speed(found),
                _megabytes(found),
            )
        )
    sizes = ("MACs / dense", "parameters", "heads", "neurons")
    return Table(
        ("network", *sizes, "Spearman", "top-1 %", "top-10 %", "sentences/s", "times as fast", "file, MB"), tuple(rows)
    )


def pretrained_rows(folder: Path) -> list[tuple[str, ...]]:
    """Rows of the README's table for the annealed networks that there are.

    They are compared with the dense network after the same training, or with the published one, and marked so.
    """
    rows = []
    for name, title, divisors in SUMMARY:
        lines = read_lines(folder / f"{name}.jsonl") if (folder / f"{name}.jsonl").exists() else []
        by_recipe = {it["recipe"]: it for it in lines}
        for divisor in divisors:
            found = [it for it in lines if (it["recipe"], it["asked"]) == ("annealed", it["total"] // divisor)]
            if not found:
                continue
            dense, control = by_recipe["dense"], by_recipe.get("dense, trained")
            precision = f", {Training.of(found[0])}" if Training.of(found[0]) != USUAL else ""
            kept = f"{mean(it['kept'] for it in found) / 1e6:,.1f} of {dense['kept'] / 1e6:,.1f} M MACs"
            error = f"{mean(it['test_error'] for it in found):.2f}"
            against = f"{control['test_error']:.2f}" if control else f"{dense['test_error']:.2f} (published)"
            smaller = (f"1/{dense[key] / mean(it[key] for it in found):.1f}" for key in ("parameters", "kept"))
            rows.append((f"{title}{precision}", kept, error, against, str(len(found)), *smaller))
    return rows


def points(lines: Lines) -> list[tuple[str, Lines]]:
    """The lines by recipe and budget, by falling budget."""
    pairs = dict.fromkeys((line["asked"], line["recipe"]) for line in lines)
    ordered = sorted(pairs, key=lambda pair: (-pair[0], RECIPES.index(pair[1])))
    return [
        (recipe, [it for it in lines if (it["asked"], it["recipe"]) == (asked, recipe)]) for asked, recipe in ordered
    ]


def _costs(lines: Lines) -> tuple[str, str]:
    share = mean(it["kept"] / it["total"] for it in lines)
    return f"{share:.3f}" if share < 1 else "1", f"{mean(it['parameters'] for it in lines):,.0f}"


def _mean(lines: Lines, key: str, form: str) -> str:
    """The mean over the lines, or a dash where it was not measured."""
    values = [it[key] for it in lines if key in it]
    return f"{mean(values):{form}}" if values else "-"


def _speed(lines: Lines) -> str:
    ratios = [it["times_as_fast"][0] for it in lines if "times_as_fast" in it]
    return f"{mean(ratios):.1f}" if ratios else "-"


def _megabytes(lines: Lines) -> str:
    return f"{mean(it['file_bytes'] for it in lines) / 1e6:.1f}"


def spread(values: Sequence[float]) -> str:
    """The mean, and the range if there are several values.

    >>> spread([90.0]), spread([90.0, 92.0])
    ('90.0', '91.0 (90.0 to 92.0)')
    """
    several = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{mean(values):.1f}{several}"


def read_lines(path: Path) -> Lines:
    """The lines of a result file."""
    if not path.exists():
        raise DataError(f"{path}: no such result. Run the example that writes it.")
    return results.read(path)
