"""The demo's figure: accuracy and channels over the epochs, units kept by layer, and the parity error."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from keepk.reports.tables import EpochRecord, LayerCount
from keepk_paper.figures.panels import DPI, INK, LARGE, SMALL, SOFT, draw_layers, draw_run, tidy
from keepk_paper.figures.parity import LOOKS, Point, curve

# Positions in fractions of the figure. They are explicit because automatic layouts let labels of neighbouring panels
# touch; a test checks that no two texts overlap.
TOP, BOTTOM = 0.735, 0.12
RUN, LAYERS, PARITY = (0.09, 0.425), (0.475, 0.66), (0.737, 0.987)  # left and right edge of each panel
TITLES = {RUN: "accuracy and plan", LAYERS: "what is kept", PARITY: "parity of 5 in 50 signs"}
NAMES = {"keepk": "annealed from {start} nodes", "adam": "this few from the start"}


def demo_figure(
    history: Sequence[EpochRecord],
    layers: Sequence[LayerCount],
    parity: Sequence[Point],
    *,
    total: int,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw the three panels.

    Args:
        history: One record per epoch.
        layers: Kept units of each layer.
        parity: The points of the parity experiment, with the columns of its result file.
        total: The number of channels before pruning.
        title: The result in one line; "->" is drawn as an arrow.
        subtitle: Details below it.

    Returns:
        The figure, which belongs to no pyplot state.
    """
    figure = Figure(figsize=(13, 5.6), dpi=DPI, facecolor="white")
    figure.text(0.016, 0.945, title.replace("->", "→"), fontsize=19, fontweight="bold", color=INK, va="center")
    figure.text(0.016, 0.875, subtitle.replace("->", "→"), fontsize=SMALL + 1, color=SOFT, va="center")
    for (left, _), words in TITLES.items():
        figure.text(left, 0.812, words, fontsize=LARGE + 1, fontweight="bold", color=INK, va="center")
    grid = figure.add_gridspec(
        2, 1, left=RUN[0], right=RUN[1], top=TOP, bottom=BOTTOM, height_ratios=(2, 3), hspace=0.14
    )
    upper = figure.add_subplot(grid[0])
    draw_run(upper, figure.add_subplot(grid[1], sharex=upper), history, total, unit="channels")
    draw_layers(figure.add_axes(_place(LAYERS, BOTTOM - 0.045, TOP + 0.045)), layers)
    draw_parity(figure.add_axes(_place(PARITY, BOTTOM, TOP)), parity)
    return figure


def draw_parity(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the test error of the networks chosen by validation error over hidden nodes, and the noise floor."""
    for place, recipe in enumerate(NAMES):
        found = [point for point in points if point["recipe"] == recipe]
        name = NAMES[recipe].format(start=max(point["total"] for point in found))
        _, colour, marker = LOOKS[recipe]
        drawn = curve(found, recipe)
        # The later recipe is drawn below with larger markers, so that both are visible where they agree.
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 6 + 3 * place, "zorder": 4 - place}
        axes.plot(drawn.nodes, drawn.chosen, linewidth=2.2, label=name, **style)
    nodes, floor, starts = sorted({it["asked"] for it in points}), points[0]["noise_floor"], points[0]["test_errors"]
    axes.axhline(floor, color=INK, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1.5)
    axes.text(nodes[-1], floor - 3, f"noise floor {floor:.1f} %", color=INK, fontsize=SMALL, ha="right", va="top")
    axes.set_xlabel(f"hidden nodes (the best of {len(starts)} starts)")
    axes.set_ylabel("test error")
    axes.set_xticks(nodes)
    axes.set_xlim(nodes[0] - 0.5, nodes[-1] + 0.5)
    axes.set_ylim(0, 68)  # errors rarely exceed 55 %; the rest is room for the legend
    axes.set_yticks(range(0, 51, 10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.legend(loc="upper left", frameon=False, fontsize=SMALL, labelcolor=INK, borderaxespad=0, labelspacing=0.3)
    tidy(axes)


def _place(span: tuple[float, float], bottom: float, top: float) -> tuple[float, float, float, float]:
    """The position as matplotlib's `add_axes` takes it: left, bottom, width, height."""
    return span[0], bottom, span[1] - span[0], top - bottom
