"""The figure of what zeros buy: error against latency of VGG-16/4, dense, with channels or weights removed, and both.

``python -m keepk_paper.figures.sparse`` draws it from `results` into `docs/images`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from keepk_paper import results
from keepk_paper.figures.panels import BLUE, DPI, INK, ORANGE, SOFT, tidy, write_png
from keepk_paper.figures.parity import GREEN
from keepk_paper.tables.sparse import FLOAT32, best, read

# By kind of network: the beginning of its names, colour and marker.
KINDS = {
    "dense": ("vgg-dense", INK, "D"),
    "channels pruned": ("vgg-channels", ORANGE, "s"),
    "weights pruned": ("vgg-weights", BLUE, "o"),
    "both": ("vgg-both", GREEN, "^"),
}


def points(cells: Sequence[Mapping[str, Any]], errors: Mapping[str, float], batch: int) -> dict[str, list[Any]]:
    """By kind of network: milliseconds for one sample in a batch, and the error in percent.

    Each network runs in the engine that is fastest for it: keepk.sparse or a dense one, all in float32.
    """
    found: dict[str, list[Any]] = {}
    for kind, (start, *_) in KINDS.items():
        mine = [it for it in cells if it["network"].startswith(start) and it["batch"] == batch]
        times = [best(it, (*FLOAT32, "keepk")) for it in mine]
        found[kind] = sorted((us / 1e3 / batch, errors[it["network"]]) for us, it in zip(times, mine, strict=True))
    return found


def sparse_figure(
    cells: Sequence[Mapping[str, Any]], errors: Mapping[str, float], batches: Sequence[int] = (1, 256)
) -> Figure:
    """One panel for each batch size."""
    figure = Figure(figsize=(9, 4.2), dpi=DPI, facecolor="white")
    for index, batch in enumerate(batches):
        axes = figure.add_axes((0.08 + 0.48 * index, 0.15, 0.41, 0.68))
        for kind, places in points(cells, errors, batch).items():
            _, colour, marker = KINDS[kind]
            if places:
                axes.plot(*zip(*places, strict=True), color=colour, marker=marker, linewidth=1.5, label=kind)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel(f"CPU ms per image, batch {batch} (log scale)", color=SOFT)
        tidy(axes)
        if index == 0:
            axes.set_ylabel("test error, %", color=SOFT)
            axes.legend(frameon=False, labelcolor=INK)
    title = "VGG-16 of width 1/4 on CIFAR-10, each network in its fastest engine"
    figure.text(0.02, 0.93, title, fontsize=13, fontweight="bold", color=INK, va="center")
    return figure


if __name__ == "__main__":
    measured = read(Path("results/benchmarks/sparse_networks.json"))["cells"]
    found_errors = {line["recipe"]: line["test_error"] for line in results.read(Path("results/sparse/models.jsonl"))}
    write_png(sparse_figure(measured, found_errors), Path("docs/images/sparsity.png"))
