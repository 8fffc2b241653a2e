"""The figures of the pretrained networks in `examples/`: accuracy by MACs.

``python -m keepk_paper.figures.budgets`` draws them from `results/examples` into `docs/images`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from keepk_paper.figures.panels import BLUE, DPI, INK, ORANGE, SOFT, tidy, write_png
from keepk_paper.figures.parity import GREEN, PURPLE
from keepk_paper.tables.budgets import read_lines

# By kind of network: colour and marker. Markers differ, so that a print in grey is readable.
LOOKS = {
    "annealed": (BLUE, "o"),
    "one-shot, Taylor": (GREEN, "^"),
    "one-shot": (PURPLE, "v"),
    "random": (ORANGE, "s"),
}
SHARES = (1.0, 0.5, 0.25, 0.1, 0.025)


def crepe_figure(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """The raw pitch accuracy of the pruned networks, with the dense and the tiny one as single points."""
    (dense,), (tiny,) = ([it for it in lines if it["network"] == name] for name in ("dense", "tiny"))
    figure = Figure(figsize=(8, 4.6), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.74))
    for name, (colour, marker) in LOOKS.items():
        mine = [it for it in lines if it["network"] == name]
        budgets = sorted({it["macs_asked"] for it in mine}, key=lambda macs: _at(mine, macs)[0])
        if not mine:
            continue
        shares, middle = zip(*(_at(mine, macs) for macs in budgets), strict=True)
        lowest, highest = (
            [extreme(it["accuracy"] for it in mine if it["macs_asked"] == macs) for macs in budgets]
            for extreme in (min, max)
        )
        shares = tuple(share / dense["macs"] for share in shares)
        axes.fill_between(shares, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        axes.plot(shares, middle, color=colour, marker=marker, linewidth=2, label=name)
    for point, name in ((dense, "dense"), (tiny, "tiny, trained from scratch")):
        share = point["macs"] / dense["macs"]
        axes.plot([share], [point["accuracy"]], color=INK, marker="D", linestyle="none")
        side = "right" if share > 0.5 else "left"
        axes.annotate(name, (share, point["accuracy"]), (0, 7), textcoords="offset points", ha=side, color=INK)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(SHARES))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(0, 105)
    axes.set_xlabel("MACs / dense (log scale)", color=SOFT)
    axes.set_ylabel("raw pitch accuracy, %", color=SOFT)
    tidy(axes)
    axes.legend(loc="lower right", frameon=False, labelcolor=INK)
    figure.text(0.02, 0.94, "CREPE pruned to a budget of MACs", fontsize=14, fontweight="bold", color=INK, va="center")
    return figure


def _at(lines: Sequence[Mapping[str, Any]], macs: float) -> tuple[float, float]:
    """The mean MACs and accuracy of the networks with a budget."""
    found = [it for it in lines if it["macs_asked"] == macs]
    return mean(it["macs"] for it in found), mean(it["accuracy"] for it in found)


if __name__ == "__main__":
    write_png(crepe_figure(read_lines(Path("results/examples/crepe.jsonl"))), Path("docs/images/crepe.png"))
