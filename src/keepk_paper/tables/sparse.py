"""Tables of `keepk.sparse` beside other engines, from the files of `benchmarks/sparse_speed.py`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepk.errors import DataError
from keepk.reports.tables import Table
from keepk_paper import results

Cell = Mapping[str, Any]
TORCH = ("torch", "torch_channels_last")
DENSE = {"ort": "ONNX Runtime", "ort_int8": "its int8", "openvino": "OpenVINO", "mnn": "MNN"}
FLOAT32 = (*TORCH, "ort", "openvino", "mnn")  # dense engines
NETWORKS = {
    "lenet-300-100": "LeNet-300-100",
    "lenet-5": "LeNet-5",
    "vgg-dense": "VGG-16/4, dense",
    "vgg-weights-10": "VGG-16/4, 10 % of weights",
    "vgg-weights-5": "VGG-16/4, 5 % of weights",
    "vgg-channels-30": "VGG-16/4, 30 % of channels",
    "vgg-both-5": "VGG-16/4, both, 5 % of weights",
    "vgg-both-2.5": "VGG-16/4, both, 2.5 % of weights",
}


def layers(folder: Path) -> Table:
    """How many times as fast as dense torch each engine and keepk.sparse are, by layer and batch size."""
    cells = read(folder / "sparse_layers.json")["cells"]
    percents = sorted(
        {int(name.partition(" ")[2]) for cell in cells for name in cell["us"] if name.startswith("keepk")}
    )
    rows = []
    for cell in cells:
        torch = best(cell, TORCH)
        times = [ratio(torch, cell, name) for name in DENSE]
        ours = [ratio(torch, cell, f"keepk {percent}") for percent in percents]
        rows.append((cell["layer"], str(cell["batch"]), f"{torch:,.0f}", *times, *ours))
    columns = ("layer", "batch", "torch, us", *DENSE.values(), *(f"keepk {percent} %" for percent in percents))
    return Table(columns, tuple(rows))


def sparse_layers(folder: Path) -> Table:
    """keepk.sparse beside the other engines that skip zeros, and beside the machine's limit."""
    report = read(folder / "sparse_layers.json")
    rows = []
    for cell in report["cells"]:
        for percent in (70, 90, 98):
            name = f"keepk {percent}"
            if name not in cell["us"]:
                continue
            ours, low, high = cell["us"][name]
            macs = cell["kept"][str(percent)] * cell["pixels"] * cell["batch"]
            rate = macs / ours / 1e3
            rows.append(
                (
                    cell["layer"],
                    str(cell["batch"]),
                    f"{percent} %",
                    f"{ours:,.1f}",
                    f"{low:,.1f} to {high:,.1f}",
                    ratio_of(cell, f"mnn_sparse {percent}", name),
                    ratio_of(cell, f"torch_csr {percent}", name),
                    f"{rate:.0f}",
                    f"{100 * rate / report['limit']:.0f} %",
                )
            )
    columns = (
        "layer",
        "batch",
        "zeros",
        "keepk, us",
        "quartiles",
        "MNN sparse",
        "torch CSR",
        "MACs/ns",
        "of the limit",
    )
    return Table(columns, tuple(rows))


def networks(folder: Path) -> Table:
    """Whole networks: microseconds of each engine, and how many times as fast keepk.sparse is."""
    report = read(folder / "benchmarks" / "sparse_networks.json")
    errors = {line["recipe"]: line["test_error"] for line in results.read(folder / "sparse" / "models.jsonl")}
    rows = []
    for cell in in_order(report["cells"]):
        ours, low, high = cell["us"]["keepk"]
        rate = cell["macs"]["left"] * cell["batch"] / ours / 1e3
        whole = not cell["in_torch"]  # all layers run in the program, so that their MACs are known
        rows.append(
            (
                NETWORKS[cell["network"]],
                f"{errors[cell['network']]:.2f}",
                str(cell["batch"]),
                f"{100 * cell['macs']['left'] / cell['macs']['dense']:.1f} %" if whole else "",
                f"{best(cell, TORCH):,.0f}",
                *(microseconds(cell, name) for name in (*DENSE, "mnn_sparse")),
                f"{ours:,.0f} ({low:,.0f} to {high:,.0f})",
                ratio_of(cell, "ort"),
                ratio_of(cell, "mnn_sparse"),
                f"{100 * rate / report['limit']:.0f} %" if whole else "",
            )
        )
    engines = ("torch", *DENSE.values(), "MNN sparse", "keepk")
    ends = ("x ONNX Runtime", "x MNN sparse", "of the limit")
    return Table(("network", "error %", "batch", "MACs left", *(f"{it}, us" for it in engines), *ends), tuple(rows))


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of networks in the order of `NETWORKS`, then by batch size."""
    return sorted(cells, key=lambda cell: (list(NETWORKS).index(cell["network"]), cell["batch"]))


def best(cell: Cell, names: Sequence[str]) -> float:
    """The microseconds of the fastest of several engines."""
    return float(min(cell["us"][name][0] for name in names if name in cell["us"]))


def ratio(reference: float, cell: Cell, name: str) -> str:
    """How many times as fast as the reference an engine is; empty if it was not measured."""
    return f"{reference / cell['us'][name][0]:.2f}" if name in cell["us"] else ""


def ratio_of(cell: Cell, name: str, ours: str = "keepk") -> str:
    """How many times as fast as an engine keepk.sparse is; empty if the engine was not measured."""
    return f"{cell['us'][name][0] / cell['us'][ours][0]:.1f}" if name in cell["us"] else ""


def microseconds(cell: Cell, name: str) -> str:
    """The microseconds of an engine; empty if it was not measured."""
    return f"{cell['us'][name][0]:,.0f}" if name in cell["us"] else ""


def read(path: Path) -> dict[str, Any]:
    """A file of `benchmarks/sparse_speed.py`."""
    if not path.exists():
        raise DataError(f"{path}: no such result. Run python benchmarks/sparse_speed.py.")
    report: dict[str, Any] = json.loads(path.read_text())
    return report
