"""The parity experiment's figure: test error by hidden nodes, for the best start and for all starts."""

from collections.abc import Mapping, Sequence
from statistics import mean, quantiles
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from keepk_paper.figures.panels import BLUE, DPI, INK, ORANGE, SOFT

GREEN, PURPLE = "#009E73", "#CC79A7"
# By recipe: label, colour and marker, in the order of the legend. Markers differ, so that a print in grey is readable.
LOOKS = {
    "keepk": ("256 nodes annealed", BLUE, "o"),
    "adam": ("Adam from the start", ORANGE, "s"),
    "sgd, light decay": ("SGD, a tenth of the decay", PURPLE, "v"),
    "sgd": ("SGD from the start", GREEN, "^"),
}

Point = Mapping[str, Any]


class Curve(NamedTuple):
    """By number of nodes, the mean error of the networks chosen by validation error, and the quartiles of all."""

    nodes: list[int]
    chosen: list[float]
    low: list[float]
    middle: list[float]
    high: list[float]


def parity_figure(points: Sequence[Point]) -> Figure:
    """Draw two panels from the points of a result file: the best start, and the spread of all starts."""
    # The dense network that `keepk` starts from is a point of the file too, far to the right of the others.
    small = [point for point in points if point["recipe"] != "keepk" or point["asked"] < point["total"]]
    floors = {point["seed"]: point["noise_floor"] for point in small}
    figure = Figure(figsize=(11, 5.4), dpi=DPI, facecolor="white")
    figure.text(0.02, 0.95, _title(small), fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.02, 0.893, _subtitle(small), fontsize=10, color=SOFT, va="center")
    grid = figure.add_gridspec(1, 2, left=0.075, right=0.985, top=0.735, bottom=0.11, wspace=0.06)
    best = figure.add_subplot(grid[0])
    every = figure.add_subplot(grid[1], sharey=best)
    for layer, (recipe, (name, colour, marker)) in enumerate(LOOKS.items()):
        drawn = curve(small, recipe)
        if drawn.nodes:
            style: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "markersize": 5.5,
                "linewidth": 2,
                "label": name,
            }
            best.plot(drawn.nodes, drawn.chosen, zorder=6 - layer, **style)
            every.fill_between(drawn.nodes, drawn.low, drawn.high, color=colour, alpha=0.15, linewidth=0)
            every.plot(drawn.nodes, drawn.middle, zorder=6 - layer, **style)
    _mark_fewest(best, small)
    for axes, title in (
        (best, "the best start, by validation error"),
        (every, "any start: median, and the middle half"),
    ):
        _draw_floor(axes, mean(floors.values()))
        _tidy(axes, title, sorted({point["asked"] for point in small}))
    best.set_ylabel("test error", color=SOFT, fontsize=11)
    lines, names = best.get_legend_handles_labels()
    figure.legend(lines, names, loc="upper left", bbox_to_anchor=(0.012, 0.87), ncols=5, frameon=False, labelcolor=INK)
    every.tick_params(labelleft=False)
    return figure


def curve(points: Sequence[Point], recipe: str) -> Curve:
    """The curve of one recipe."""
    nodes = sorted({point["asked"] for point in points if point["recipe"] == recipe})
    found = [[point for point in points if (point["recipe"], point["asked"]) == (recipe, asked)] for asked in nodes]
    chosen = [mean(point["test_error"] for point in of_draws) for of_draws in found]
    quarters = [_quarters([error for point in of_draws for error in point["test_errors"]]) for of_draws in found]
    low, middle, high = ([quarter[place] for quarter in quarters] for place in range(3))
    return Curve(nodes, chosen, low, middle, high)


def fewest_at_floor(points: Sequence[Point]) -> int | None:
    """The smallest number of nodes at which the annealed network reaches the noise floor on every draw."""
    ours = [point for point in points if point["recipe"] == "keepk"]
    missed = {point["asked"] for point in ours if not point["at_floor"]}
    return min({point["asked"] for point in ours} - missed, default=None)


def _quarters(errors: list[float]) -> list[float]:
    # `quantiles` needs two points; with one start all three quartiles are its error.
    return quantiles(errors, n=4, method="inclusive") if len(errors) > 1 else errors * 3


def _title(points: Sequence[Point]) -> str:
    fewest = fewest_at_floor(points)
    if fewest is None:
        return "Parity: test error by hidden nodes"
    return f"{fewest} of 256 hidden nodes are enough to learn a parity of five"


def _subtitle(points: Sequence[Point]) -> str:
    seeds = {point["seed"] for point in points}
    draws = f"{len(seeds)} data draws" if len(seeds) > 1 else "one data draw"
    starts = max(point["inits"] for point in points)
    return f"50 signs, the label is the product of 5 of them, 10 % of labels are wrong; {draws}, {starts} starts each."


def _draw_floor(axes: Axes, floor: float) -> None:
    axes.axhline(floor, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1.5, label="noise floor")
    note = axes.annotate(f"noise floor {floor:.1f} %", (1, floor), (0, -7), ("axes fraction", "data"), "offset points")
    note.set(color=INK, fontsize=10, ha="right", va="top")


def _mark_fewest(axes: Axes, points: Sequence[Point]) -> None:
    fewest = fewest_at_floor(points)
    if fewest is None:
        return
    drawn = curve(points, "keepk")
    error = drawn.chosen[drawn.nodes.index(fewest)]
    ring: dict[str, Any] = {
        "marker": "o",
        "markersize": 14,
        "markerfacecolor": "none",
        "markeredgewidth": 2,
        "color": BLUE,
    }
    axes.plot([fewest], [error], zorder=7, **ring)
    note = axes.annotate(f"{fewest} nodes: {error:.1f} %", (fewest, error), (0, -13), "data", "offset points")
    note.set(color=BLUE, fontsize=11.5, fontweight="bold", ha="center", va="top")


def _tidy(axes: Axes, title: str, nodes: Sequence[int]) -> None:
    axes.set_title(title, fontsize=11, color=SOFT, loc="left", pad=8)
    axes.set_xticks(list(nodes))
    axes.set_xlim(nodes[0] - 0.4, nodes[-1] + 0.4)
    axes.set_ylim(0, 54)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_xlabel("hidden nodes", color=SOFT, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=10)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
