"""The figures of the pretrained networks in `examples/`: accuracy by MACs.

``python -m keepk_paper.figures.budgets`` draws them from `results/examples` into `docs/images`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from keepk_paper.figures.panels import BLUE, DPI, INK, ORANGE, SOFT, tidy, write_png
from keepk_paper.figures.parity import GREEN, PURPLE
from keepk_paper.tables.budgets import read_lines

Line = Mapping[str, Any]
# By recipe: colour and marker. Markers differ, so that a print in grey is readable.
LOOKS = {
    "annealed": (BLUE, "o"),
    "annealed, random": (ORANGE, "s"),
    "one-shot, Taylor": (GREEN, "^"),
    "one-shot": (PURPLE, "v"),
    "one-shot, random": (SOFT, "x"),
}


class Look(NamedTuple):
    """A figure: its title, the label of the values, the value of a line, the ticks, and the single networks' labels."""

    title: str
    label: str
    value: Callable[[Line], float]
    shares: Sequence[float]
    singles: Mapping[str, str]


CREPE = Look(
    "CREPE pruned to a budget of MACs",
    "raw pitch accuracy, %",
    lambda line: 100 - float(line["test_error"]),
    (1.0, 0.5, 0.25, 0.1, 0.025),
    {"dense": "dense", "tiny": "tiny", "tiny, trained": "tiny, same training"},
)
MINILM = Look(
    "all-MiniLM-L6-v2 pruned to a budget of MACs",
    "top-10 agreement with dense, %",
    lambda line: float(line["top10"]),
    (1.0, 0.5, 1 / 3),
    {"dense": "dense", "3 of 6 layers": "3 of 6 layers"},
)


def budget_figure(lines: Sequence[Line], look: Look) -> Figure:
    """The pruned networks as one curve per recipe, with the range over seeds, and the others as single points."""
    figure = Figure(figsize=(8, 4.6), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.74))
    for recipe, (colour, marker) in LOOKS.items():
        mine = [it for it in lines if it["recipe"] == recipe]
        budgets = sorted({it["asked"] for it in mine})
        if not mine:
            continue
        groups = [[it for it in mine if it["asked"] == asked] for asked in budgets]
        shares = [mean(it["kept"] / it["total"] for it in group) for group in groups]
        values = [[look.value(it) for it in group] for group in groups]
        axes.fill_between(shares, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.15, linewidth=0)
        axes.plot(shares, [*map(mean, values)], color=colour, marker=marker, linewidth=2, label=recipe)
    single = [it for it in lines if it["recipe"] in look.singles]
    for line in single:
        share, value = line["kept"] / line["total"], look.value(line)
        axes.plot([share], [value], color=INK, marker="D", linestyle="none")
        side, name = "right" if share > 0.4 else "left", look.singles[line["recipe"]]
        # One label of two close points goes below.
        below = any(0 < look.value(it) - value < 5 and it["kept"] == line["kept"] for it in single)
        axes.annotate(name, (share, value), (0, -14 if below else 7), textcoords="offset points", ha=side, color=INK)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(look.shares))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_ylim(0, 108)
    axes.set_xlabel("MACs / dense (log scale)", color=SOFT)
    axes.set_ylabel(look.label, color=SOFT)
    tidy(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False, labelcolor=INK)
    figure.text(0.02, 0.94, look.title, fontsize=14, fontweight="bold", color=INK, va="center")
    return figure


if __name__ == "__main__":
    for name, look in (("crepe", CREPE), ("minilm", MINILM)):
        lines = read_lines(Path(f"results/examples/{name}.jsonl"))
        write_png(budget_figure(lines, look), Path(f"docs/images/{name}.png"))
